"""Half an hour of healthy behaviour in accelerated time: no verdict at any second of it. Each has its control."""

import pytest

from zerogap.watchdog import judge
from zerogap.watchdog.budgets import Budgets
from zerogap.watchdog.events import Activity, Exit, Probe
from zerogap.watchdog.rules import load_rules
from zerogap.watchdog.scan import Scanner
from zerogap.watchdog.seen import Seen

BOOK = load_rules()
URL = "http://127.0.0.1:30000"
START = 1_760_000_000.0
ERRORS = [
    "AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90.",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=26, OpType=ALLREDUCE",
    "OSError: [Errno 28] No space left on device",
    "Error: All connection attempts failed, retrying... (attempt 3/60, url=http://x/generate, response=None)",
    "Error: Server error '503 Service Unavailable' for url 'http://x/generate'",
    "trainer: RL trainer finished! (exit 0)",
    "orchestrator: Waiting for new policy...   (age 600s)",
    "restart attempt 1 free=69.36GiB need=110GiB -> OOM",
    'POST /generate 400 "Input length 57719 tokens exceeds maximum 55539"',
    "cgroup memory.events: oom_kill 1",
    "slurmstepd: error: *** JOB 4242 ON node7 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***",
    'inference: exit=1 last="ValueError: No available memory for the cache blocks"',
    "group slime-pp_0: joined={src0,eng0} missing={eng1}",
    "group slime-pp_1: joined={src1,eng1} missing={eng0}",
    "dmon: sm=96 mem=0",
    "Killed",
]


class World:
    """A run in accelerated time that is judged at every second."""

    def __init__(self, **options):
        self.seen, self.scanner, self.now = Seen(BOOK, START, Budgets(), **options), Scanner(BOOK), START
        self.verdicts = []
        self.cores = 1.0

    def say(self, *lines, source="run"):
        for line in lines:
            self.now += 1e-4
            self.seen.talked(self.now)
            for raw in self.scanner.feed(source, f"{line}\n".encode()):
                for hit in self.scanner.match(source, raw, self.now):
                    self.seen.hit(hit)
        for hit in self.scanner.flush(source, self.now):
            self.seen.hit(hit)

    def sleep(self, seconds, every=None):
        for second in range(int(seconds)):
            self.now += 1.0
            if every is not None:
                every(second)
            self.seen.active_sample(Activity(self.now, self.cores))
            verdict = judge.check(self.seen, self.now)
            if verdict is not None:
                self.verdicts.append(verdict)

    def probe(self, ok, level="generate", detail="", **more):
        self.seen.probe(Probe(self.now, URL, level, ok, detail, **more))


def test_half_an_hour_of_health():
    world = World()
    # A slow start: download, load, compile, graph capture; requests are refused and answered 503 meanwhile.
    world.say("Load weight begin. avail mem=78.00 GB")
    world.sleep(120, lambda s: world.probe(False, "socket", "connection failed", refused=True))
    for percent in range(0, 100, 20):
        world.say(f"Loading safetensors checkpoint shards:  {percent}% Completed")
        world.sleep(30)
    world.say("Compiling a graph for dynamic shape takes 30.21 s")
    world.sleep(200, lambda s: world.probe(False, "health", "/health answers 503"))
    for graph in range(1, 36, 5):
        world.say(f"Capturing batches: {graph}/36")
        world.sleep(15)
    world.say("The server is fired up and ready to roll!")
    world.probe(True)
    # First weight sync: the engine does not generate meanwhile.
    world.say("Timer update_weights start")
    world.sleep(90, lambda s: world.probe(False, "generate", "no token") if s % 10 == 0 else None)
    world.say("Timer update_weights end (elapsed: 90.0s)")
    for step in range(4):
        world.say("Timer rollout start")
        # A prefill of over 20 s: the engine's own health check complains, and a model writes errors into its text.
        for _ in range(6):
            world.say("Prefill batch. #new-token: 8192 #queue-req: 41")
            world.sleep(6, lambda s: world.probe(False, "generate", "no token in 10 s") if s == 0 else None)
        world.say("Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.")
        world.probe(True)
        for line in ERRORS:
            world.say(line)
            world.sleep(1)
            world.say("Decode batch. #running-req: 12, #token: 4096, token usage: 0.12")
        # A sandbox of a code task fails now and then, and so does a compiler.
        world.seen.exit(Exit(world.now, 77, "python sandbox.py", "other", 1, age_s=2.0))
        world.seen.exit(Exit(world.now, 78, "ptxas", "helper", -9, age_s=1.0))
        world.sleep(10)
        world.say(f"log_utils.py:123 - rollout {step}: {{'rollout/raw_reward': 0.25}}")
        # Offload window: the engine's memory is released, it cannot generate.
        world.say('INFO: 127.0.0.1:1 - "POST /release_memory_occupation HTTP/1.1" 200 OK', "Timer train start")
        world.sleep(
            600 if step == 2 else 60, lambda s: world.probe(False, "generate", "no token") if s % 20 == 0 else None
        )
        world.say('INFO: 127.0.0.1:1 - "POST /resume_memory_occupation HTTP/1.1" 200 OK')
        world.say(f"log_utils.py:542 - step {step}: {{'train/loss': 0.1, 'train/grad_norm': 1.0}}")
        world.say("Timer update_weights start")
        world.sleep(20)
        world.say("Timer update_weights end (elapsed: 20.0s)")
        world.probe(True)
    world.say("***** Running Evaluation *****")
    world.sleep(300, lambda s: world.seen.counted(world.now, True, s % 30 == 0))
    world.say("eval 4: {'eval/gsm8k': 0.5}", "saving checkpoint at iteration      4 to /data/ckpt in torch_dist format")
    world.cores = 0.05  # waiting for a slow disk
    world.sleep(240)
    # The engines are put away before the last save.
    world.seen.exit(Exit(world.now, 4242, "sglang::scheduler", "engine", -9, age_s=3000.0))
    world.sleep(120, lambda s: world.probe(False, "socket", "connection failed", refused=True) if s > 100 else None)
    assert world.now - START > 1800
    assert world.verdicts == []


def test_control_the_same_half_hour_with_a_dead_engine_in_the_third_rollout_is_not_healthy():
    world = World()
    world.say("The server is fired up and ready to roll!")
    for step in range(2):
        world.say("Timer rollout start", "Decode batch. #running-req: 12, #token: 4096")
        world.sleep(30)
        world.say(f"step {step}: {{'train/loss': 0.1}}")
    world.say("Timer rollout start")
    world.seen.exit(Exit(world.now, 4242, "sglang::scheduler", "engine", -9, age_s=300.0))
    world.sleep(5)
    assert world.verdicts
    assert world.verdicts[0].name == "died"
    assert world.verdicts[0].at - world.verdicts[0].since <= 4


def test_a_silent_ten_minute_step_is_healthy_with_a_busy_cpu_and_stalls_without():
    for cores, healthy in ((1.0, True), (0.0, False)):
        world = World()
        for step in range(5):
            world.say("Timer train start")
            world.sleep(60)
            world.say(f"step {step}: {{'train/loss': 0.1}}", "Timer train start")
        world.cores = cores
        world.sleep(600)
        assert (world.verdicts == []) is healthy
        if not healthy:
            assert world.verdicts[0].name == "stalled"


def test_a_plain_script_that_computes_for_hours_in_silence_is_left_alone():
    world = World()
    world.say("loading data")
    world.sleep(4 * 3600)
    assert world.verdicts == []
    world.cores = 0.0
    world.sleep(3600)
    assert world.verdicts[0].name == "failed-to-start"


def test_repeated_lines_are_no_progress():
    world = World()
    world.say("step 0: {'train/loss': 0.1}")
    world.cores = 0.0
    seen = world.seen
    before = seen.clocks["step"]
    world.sleep(5)
    world.say("step 0: {'train/loss': 0.1}")  # Megatron prints each step twice
    assert seen.clocks["step"] == before


# A refusal that comes back identically for minutes while nothing else happens is itself missing progress.
ALONE = [line for line in ERRORS if "restart attempt" not in line and " 400 " not in line]


@pytest.mark.parametrize("line", ALONE)
def test_no_line_alone_stops_a_run_that_is_busy(line):
    world = World()
    world.sleep(5)
    for _ in range(20):
        world.say(line)
        world.sleep(60)
    assert world.verdicts == [], world.verdicts[0]


def test_fault_tolerance_gets_time_to_restart_an_engine():
    for tolerant, stopped in ((True, False), (False, True)):
        world = World(fault_tolerant=tolerant)
        world.say("The server is fired up and ready to roll!", "step 0: {'train/loss': 0.1}", "Timer rollout start")
        world.seen.exit(Exit(world.now, 1, "sglang::scheduler", "engine", -9, age_s=300.0))
        world.sleep(60)
        world.seen.engine_started(world.now)
        world.sleep(200)
        assert bool(world.verdicts) is stopped


def test_one_bad_step_is_skipped_two_in_a_row_are_a_verdict():
    world = World()
    world.say(
        "step 0: {'train/loss': nan, 'train/grad_norm': 1.0}", "step 1: {'train/loss': 0.1, 'train/grad_norm': 1.0}"
    )
    world.sleep(2)
    assert world.verdicts == []
    world.say("step 2: {'train/loss': nan}", "step 3: {'train/loss': nan}")
    world.sleep(2)
    assert world.verdicts[0].cause == "non-finite-loss"


def test_a_heartbeat_that_stops_is_a_stall():
    world = World()
    world.seen.heartbeat_at = world.now
    world.sleep(200)
    world.seen.heartbeat_at = world.now
    world.sleep(290)
    assert world.verdicts == []
    world.sleep(30)
    assert world.verdicts[0].cause == "heartbeat-stopped"


def test_an_engines_short_lived_children_are_not_the_engine():
    world = World()
    world.say("The server is fired up and ready to roll!", "step 0: {'train/loss': 0.1}", "Timer rollout start")
    for status, age in ((1, 0.1), (-9, 3.0), (1, 8.0)):
        world.seen.exit(Exit(world.now, 99, "sh", "engine-child", status, age_s=age))
        world.say("Decode batch. #running-req: 12, #token: 4096")
        world.sleep(30)
    assert world.verdicts == []


def test_numbers_that_are_none_and_endless_names_do_no_harm():
    world = World(processes=False)
    world.say("gpu_util=[1.2.3, 4]", "server_args=ServerArgs(watchdog_timeout=3.0.0.1)", "(nothing for 99 s)")
    for number in range(3000):
        world.say(
            f'POST /generate 400 "body {number}"',
            f"phase=p{number} begin",
            f"group g: joined={{a{number}}} missing={{b{number}}}",
        )
    assert len(world.seen.edges) <= 1001
    assert len(world.seen.open_timers) <= 1001
