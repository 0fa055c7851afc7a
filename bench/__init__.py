"""How fast, how late and at what cost: up-streamer beside a bare relay (docs/benchmarks.md)."""
