"""The one decoding loop and its parts."""
