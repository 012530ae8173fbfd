"""Request traces replayed through the real scheduler and the real tree, on a simulated clock."""
