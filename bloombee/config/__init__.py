"""Settings from flags and YAML, validated once; the only reader of the environment."""
