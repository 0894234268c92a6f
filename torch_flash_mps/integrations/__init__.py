"""One module per library; none is imported, and nothing is registered, unless a user asks."""
