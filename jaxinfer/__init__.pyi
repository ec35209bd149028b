from jaxinfer.engine.llm import LLM as LLM
from jaxinfer.request import CompletionOutput as CompletionOutput
from jaxinfer.request import RequestOutput as RequestOutput
from jaxinfer.request import SamplingParams as SamplingParams
from jaxinfer.version import __version__ as __version__
