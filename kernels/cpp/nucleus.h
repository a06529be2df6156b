// Where top-k and top-p cut a row of logits: found by histograms, without sorting the vocabulary.
#pragma once

#include "logits.h"

namespace zg {
namespace ZG_PATH {
namespace {

// Tokens are ranked by their distance from the peak, M - l >= 0, and then by id. The bits of a non-negative float rank as
// whole numbers do. A cut keeps the tokens of a lower key, and those of its key up to its id.
struct Cut {
  int32_t key, id;
};
constexpr Cut NO_CUT{INT32_MAX, INT32_MAX - 1};

ZG_INLINE I16 within_cut(Cut cut, I16 key, I16 id) {
  return (key < seti(cut.key)) | ((key == seti(cut.key)) & (id < (seti(cut.id) + seti(1))));
}

struct Candidate {
  int32_t key, id;
  int64_t amount;
};

// The row in question.
struct Ranked {
  const float* l;  // [width], -inf beyond the vocabulary; no NaN
  int64_t width;   // a multiple of 16
  float peak;
  float offset;  // distance of the peak itself: 0, or log(total) to rank by log-prob
};
ZG_INLINE F16 distance(const Ranked& row, int64_t k) { return set(row.offset) - (load(row.l + k) - set(row.peak)); }

constexpr int BUCKETS = 2048;    // 128 for each power of two of the distance from 2^-8 to 2^8
constexpr float UNIT = 0x1p42f;  // masses are whole multiples of 1 / UNIT

// The search first looks at tokens up to a distance from the peak, and goes further only if the cut is not among them.
// Masses from 12 on are below 2^25, so that 64 of them fit a lane of 32 bits.
constexpr float REACHES[] = {5.0f, 12.0f, INFINITE};
ZG_INLINE I16 within_reach(F16 d, float reach) {
  return reach == INFINITE ? seti(-1) : d < set(reach);
}

ZG_INLINE I16 bucket_of(I16 key) {
  const I16 b = (key >> 16) - seti(((127 - 8) << 7) - 1);
  const I16 low = select(b < seti(0), seti(0), b);
  return select(low > seti(BUCKETS - 1), seti(BUCKETS - 1), low);
}

// Amounts of the tokens within `within`, by bucket: their masses, or 1 each; those beyond `reach` go into no bucket.
// Returns the sum of all masses (of those within).
template <bool MASS>
int64_t fill_buckets(const Ranked& row, Cut within, float reach, int64_t* buckets) {
  for (int b = 0; b < BUCKETS; ++b) buckets[b] = 0;
  int64_t sum = 0;
  for (int64_t begin = 0; begin < row.width; begin += BLOCK) {
    const int64_t end = begin + BLOCK < row.width ? begin + BLOCK : row.width;
    I16 far_lanes = seti(0);  // 64 masses below 2^42 e^-12 fit
    for (int64_t k = begin; k < end; k += LANES) {
      const F16 d = distance(row, k);
      const I16 key = bits(d);
      const I16 taken = within_cut(within, key, lane_numbers() + seti(static_cast<int32_t>(k)));
      int32_t bucket[LANES];
      float mass[LANES];
      if (MASS) {
        const F16 m = exp(set(0.0f) - d) * set(UNIT);
        if (reach != INFINITE) far_lanes = far_lanes + to_int(select(taken & (d >= set(reach)), m, set(0.0f)));
        store(mass, m);
      }
      uint32_t word = mask_word(taken & within_reach(d, reach));
      if (word == 0) continue;
      storei(bucket, bucket_of(key));
      if (word == 0xffffu) {
#pragma GCC unroll 16
        for (int j = 0; j < LANES; ++j) buckets[bucket[j]] += MASS ? static_cast<int64_t>(mass[j]) : 1;
        continue;
      }
      for (; word != 0; word &= word - 1) {
        const int j = __builtin_ctz(word);
        buckets[bucket[j]] += MASS ? static_cast<int64_t>(mass[j]) : 1;
      }
    }
    int32_t lanes[LANES];
    storei(lanes, far_lanes);
    for (int j = 0; j < LANES; ++j) sum += lanes[j];
  }
  for (int b = 0; b < BUCKETS; ++b) sum += buckets[b];
  return sum;
}

// The first of `candidates` (in id order) in rank order at which the running sum reaches `limit`; `before` comes earlier.
Cut cut_among(Candidate* candidates, int64_t count, int64_t before, int64_t limit) {
  for (int shift = 24; shift >= 0; shift -= 8) {
    int64_t sums[256] = {};
    for (int64_t i = 0; i < count; ++i) sums[(candidates[i].key >> shift) & 255] += candidates[i].amount;
    int digit = 0;
    for (; digit < 255 && before + sums[digit] < limit; ++digit) before += sums[digit];
    int64_t left = 0;
    for (int64_t i = 0; i < count; ++i)
      if (((candidates[i].key >> shift) & 255) == digit) candidates[left++] = candidates[i];
    count = left;
  }
  for (int64_t i = 0; i < count; ++i) {
    before += candidates[i].amount;
    if (before >= limit) return {candidates[i].key, candidates[i].id};
  }
  return NO_CUT;
}

// The cut after the token, of those within `within`, at which the amounts reach the limit: `amount` tokens, or the share `amount` of
// the whole mass. The most likely token is always kept.
template <bool MASS>
Cut find_cut(const Ranked& row, Cut within, double amount, Candidate* room) {
  int64_t buckets[BUCKETS];
  int64_t limit = 0, before = 0;
  int b = BUCKETS;
  for (const float reach : REACHES) {
    if (MASS && reach < 12.0f) continue;
    const int64_t whole = fill_buckets<MASS>(row, within, reach, buckets);
    const double aim = MASS ? amount * static_cast<double>(whole) : amount;
    limit = static_cast<int64_t>(aim);
    if (static_cast<double>(limit) < aim) ++limit;  // a token is kept if what comes before it is less than the aim
    if (limit < 1) limit = 1;
    before = 0;
    for (b = 0; b < BUCKETS && before + buckets[b] < limit; ++b) before += buckets[b];
    if (b < BUCKETS) {
      int64_t count = 0;
      for (int64_t k = 0; k < row.width; k += LANES) {
        const F16 d = distance(row, k);
        const I16 key = bits(d);
        const I16 id = lane_numbers() + seti(static_cast<int32_t>(k));
        uint32_t word = mask_word((bucket_of(key) == seti(b)) & within_cut(within, key, id) & within_reach(d, reach));
        if (word == 0) continue;
        int32_t keys[LANES];
        float mass[LANES];
        storei(keys, key);
        if (MASS) store(mass, exp(set(0.0f) - d) * set(UNIT));
        for (; word != 0; word &= word - 1) {
          const int j = __builtin_ctz(word);
          room[count++] = {keys[j], static_cast<int32_t>(k) + j, MASS ? static_cast<int64_t>(mass[j]) : 1};
        }
      }
      return cut_among(room, count, before, limit);
    }
  }
  return within;
}

}  // namespace
}  // namespace ZG_PATH
}  // namespace zg
