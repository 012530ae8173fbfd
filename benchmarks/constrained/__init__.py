"""What constraints cost: compiling, masks, and serving with them."""
