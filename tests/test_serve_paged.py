"""The scheduler of examples/serve_paged.py on a small random model and many short requests."""

import random
import re

import pytest
import serve_paged
import torch
from tiny_models import tiny


def _requests(generator, count):
    requests, arrival = [], 0
    for index in range(count):
        arrival += generator.choice([0, 0, 1, 5])
        prompt = torch.tensor([generator.randrange(97) for _ in range(generator.randint(1, 50))])
        requests.append(
            serve_paged.Request(f"#{index}", arrival, prompt, generator.randint(1, 30))
        )
    return requests


@pytest.mark.parametrize("number", range(3))
def test_each_request_gets_the_tokens_of_a_run_alone(device, capsys, number):
    generator = random.Random(number)
    model = tiny("llama", num_key_value_heads=2, max_position_embeddings=128)
    requests = _requests(generator, 12)
    expected = [serve_paged.run_alone(model, request) for request in requests]
    serve_paged.use_pages(model)
    cache = serve_paged.PagedCache(model.config, model.dtype, num_pages=11, page_size=16)
    serve_paged.serve(serve_paged.Engine(model, cache, max_batch=4), requests)
    assert [request.tokens for request in requests] == expected
    # All pages are back, as empty as they were.
    assert sorted(cache.free) == list(range(11))
    assert all(pages.isnan().all() for layer in cache.layers for pages in layer)
    events = capsys.readouterr().out
    assert events.count("admitted") == events.count("finished") == 12
    running, used = (set(map(int, re.findall(pattern, events)))
                     for pattern in (r"(\d+) running", r"(\d+) of 11 pages"))
    assert max(running) >= 3 and max(used) >= 8


def test_a_request_waits_until_its_pages_are_free(device, capsys):
    model = tiny("llama", num_key_value_heads=2)
    serve_paged.use_pages(model)
    cache = serve_paged.PagedCache(model.config, model.dtype, num_pages=3, page_size=16)
    engine = serve_paged.Engine(model, cache, max_batch=4)
    first, second = (serve_paged.Request(name, 0, torch.arange(20), 4) for name in "ab")
    with torch.no_grad():
        engine.admit(first)
    assert len(first.pages) == 2 and not engine.can_admit(second)
    serve_paged.serve(engine, [second])
    events = [line.split()[2:4] for line in capsys.readouterr().out.splitlines()]
    assert events == [["finished", "a"], ["admitted", "b"], ["finished", "b"]]
    assert second.tokens == first.tokens
