"""The live page of a server: what it shows, who is signed in, and how changes reach open pages."""
