import torch

# Tests share few cores with others: torch's threads would wait for one another at each of the
# many small layers. The library's own threads do not.
torch.set_num_threads(1)
