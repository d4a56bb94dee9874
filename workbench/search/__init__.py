"""From logits to draft trees: n-gram trie and pruning."""
