"""HF-compatible model classes, sessions, routing and recovery."""

from bloombee.client.async_model import AsyncDistributedModelForCausalLM
from bloombee.client.auto import AutoDistributedModelForCausalLM
from bloombee.client.cache import RemoteCache
from bloombee.client.completions import Choice, Completion, Delta
from bloombee.client.inference_session import InferenceSession
from bloombee.client.model import DistributedModelForCausalLM
from bloombee.client.parameters import SamplingParams
from bloombee.client.prompts import Request

__all__ = [
    "AsyncDistributedModelForCausalLM",
    "AutoDistributedModelForCausalLM",
    "Choice",
    "Completion",
    "Delta",
    "DistributedModelForCausalLM",
    "InferenceSession",
    "RemoteCache",
    "Request",
    "SamplingParams",
]
