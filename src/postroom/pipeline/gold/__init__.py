"""The gold layer: aggregates of silver, and how they follow its changes. Silver never imports it."""
