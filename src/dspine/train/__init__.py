"""Training of drafters: data, features, the torch module, objective, trainer, evaluation."""
