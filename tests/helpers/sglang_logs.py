"""Lines of SGLang's logs, as its `metrics_reporter.py` writes them."""

SERVER_ARGS = (
    "[2026-11-02 05:49:01] server_args=ServerArgs(model_path='m', speculative_num_steps={}, "
    "speculative_eagle_topk={}, tp_size=1)\n"
)


def decode_line(batch, throughput, accept_length=None):
    acceptance = f"accept len: {accept_length}, accept rate: 0.42, " if accept_length else ""
    return (
        f"[2026-11-02 05:49:05] Decode batch. #running-req: {batch}, #token: 541, "
        f"token usage: 0.03, {acceptance}cuda graph: True, "
        f"gen throughput (token/s): {throughput}, #queue-req: 0, \n"
    )


def write_log(path, length, batch, throughput, accept_length):
    line = decode_line(batch, throughput, accept_length)
    path.write_text(SERVER_ARGS.format(length, 1 if length else None) + line * 4)
