"""HF-compatible model classes, sessions, routing and recovery."""

from bloombee.client.auto import AutoDistributedModelForCausalLM
from bloombee.client.cache import RemoteCache
from bloombee.client.inference_session import InferenceSession
from bloombee.client.model import DistributedModelForCausalLM

__all__ = [
    "AutoDistributedModelForCausalLM",
    "DistributedModelForCausalLM",
    "InferenceSession",
    "RemoteCache",
]
