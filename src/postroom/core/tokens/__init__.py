"""Token budgets of models as pure values."""
