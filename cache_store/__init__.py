"""The disk-backed store of chunk KV and the catalog of documents and chunks."""
