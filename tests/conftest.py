"""Without a GPU, kernels run in Triton's interpreter. Triton reads this when it is first imported, by whichever test comes first."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
