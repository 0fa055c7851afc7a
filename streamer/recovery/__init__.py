"""Recovery sources: what a topic's stream has lost is fetched from elsewhere, and appended in order."""
