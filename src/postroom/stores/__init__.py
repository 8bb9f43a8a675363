"""The leased half: records that are claimed, renewed and finished. One module a backend."""
