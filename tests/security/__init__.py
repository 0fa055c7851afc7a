"""What a stranger can do to a gateway, tried with real processes, and the bounds within which it must stay
(docs/security.md)."""
