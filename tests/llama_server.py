"""Serve a GGUF file with llama.cpp's own server, from the package xllamacpp: python tests/llama_server.py FILE PORT"""
import sys
import threading

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 1024, 1, 1
params.warmup = False
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
threading.Event().wait()
