"""From logits to tokens: edits (bias, bans, masks, penalties), cuts, the pick, its scores."""
