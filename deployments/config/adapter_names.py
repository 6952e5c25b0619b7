"""Full names of adapters, `base:adapter`. A model's own name has no colon
(deployments.config.model_section.check_name)."""


def full_name(base: str, adapter: str) -> str:
    """The name that means this adapter alone, whatever other models have."""
    return f"{base}:{adapter}"


def is_full(name: str) -> bool:
    """Whether a name says which model its adapter is for."""
    return ":" in name


def base_of(name: str) -> str:
    """The model of a model's name or of an adapter's full name."""
    return name.partition(":")[0]


def bare_of(name: str) -> str:
    """An adapter's name without its base."""
    return name.partition(":")[2] if is_full(name) else name
