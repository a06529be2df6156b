"""What must hold: contracts (TOML), rules over facts, verdicts where unknown is never yes. No torch import."""
