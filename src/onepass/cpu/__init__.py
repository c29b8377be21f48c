"""The CPU backend. Each module runs one family: `infer`, `forward` and `backward` turn a plan into a callable on tensors."""
