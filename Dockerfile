# What the README installs, with the compiler that torch.compile and Triton need.
#
#   docker build -t log-gpt .
#   docker run --rm -it --gpus all --ipc host -v "$PWD/runs:/log-gpt/runs" -v "$PWD/datasets:/log-gpt/datasets" log-gpt
#
# Without a GPU: docker build -t log-gpt --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /log-gpt
COPY . .
ARG TORCH_INDEX=https://pypi.org/simple
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url "$TORCH_INDEX" -e .
CMD ["bash"]
