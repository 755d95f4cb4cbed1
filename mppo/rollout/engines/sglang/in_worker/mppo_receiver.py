"""Runs inside every tensor-parallel worker of a stock SGLang server, and takes in exactly its own shards.

The server is started with `--custom-weight-loader mppo_receiver.load` and this file's folder on its PYTHONPATH; it
needs nothing but torch. Orders come in the body of `/update_weights_from_tensor`, which only whoever controls the
server can post; tensors come point to point from the trainer's ranks, over a process group of their own. An exception
that leaves a loader ends the server, so none does: what went wrong is written to the group's store, and to the log.

What travels in each round from a trainer rank to a worker is the parts that the manifest lists for them. Whole, small
ones come in one message, and then each of at least `alone_bytes` in a message of its own. Of a delta all come in one,
each as the places (int32, in the part's own numbering) and values of the entries that changed.
"""

import base64
import json
import pickle
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

ORDER = "__mppo__"
"""The one tensor in the body of a request: an order, as JSON in bytes."""
WHOLE = -1
"""Instead of a number of changed entries."""


def load(model, named_tensors):
    """What SGLang calls: obey one order. Never raises."""
    reply, receiver = None, None
    try:
        receiver = model.__dict__.setdefault("_mppo_receiver", Receiver())
        order = json.loads(bytes(dict(named_tensors)[ORDER].tolist()))
        reply = receiver.obey(model, order)
    except Exception as error:
        traceback.print_exc()
        reply = {"error": f"{type(error).__name__}: {error}"}
        if receiver is not None:
            receiver.leave()
    finally:
        if receiver is not None and receiver.store is not None:
            try:
                receiver.store.set(receiver.reply_key, json.dumps(reply))
            except Exception:
                traceback.print_exc()


class Receiver:
    """Of one worker: the group that it was told to join, and what it is to get from whom."""

    def __init__(self):
        self.name = self.store = self.group = self.rounds = self.timeout = self.device = self.place = None
        self.reply_key, self.alone_bytes = "", 0

    def obey(self, model, order):
        if order["action"] == "agree":
            return self.agree(model, order)
        if order["group"] != self.name:
            raise ValueError(f"this worker agreed to the group {self.name}, not to {order['group']}")
        self.reply_key = f"{order['reply']}/{_tp_rank()}"
        if order["action"] == "join":
            return self.join()
        if order["action"] == "receive":
            return self.receive(dict(model.named_parameters()), order["whole"])
        raise ValueError(f"no such order: {order['action']!r}")

    def agree(self, model, order):
        """Leave any former group, and accept what is to come in the new one."""
        self.leave()
        self.timeout = timedelta(seconds=order["timeout_s"])
        self.store = dist.TCPStore(order["host"], order["port"], is_master=False, timeout=self.timeout)
        self.reply_key = f"{order['reply']}/{_tp_rank()}"
        parameters = dict(model.named_parameters())
        check(parameters, order["manifest"])
        self.name, self.place, self.device = order["group"], order, next(iter(parameters.values())).device
        return {"agreed": self.name}

    def join(self):
        order, store = self.place, dist.PrefixStore(self.name, self.store)
        rank = order["ranks"] + _tp_rank()
        if order["handles"]:
            self.group = Handles(store, rank)
        else:
            self.group = joined(store, rank, order["size"], self.timeout, order["host"], self.device)
        self.rounds, self.alone_bytes = order["manifest"]["rounds"], order["manifest"]["alone_bytes"]
        return {"joined": self.name}

    @torch.no_grad()
    def receive(self, parameters, whole):
        """All rounds: while one is written into the parameters, the next is under way."""
        received = 0
        arriving = [self.ask(parameters, messages, whole) for messages in self.rounds[:1]]
        for number in range(len(self.rounds)):
            now = arriving.pop()
            if number + 1 < len(self.rounds):
                arriving.append(self.ask(parameters, self.rounds[number + 1], whole))
            received += sum(payload.write(self.timeout) for payload in now)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return {"received": received}

    def ask(self, parameters, messages, whole):
        return [Payload(self, parameters, message, whole) for message in messages]

    def take(self, buffer, source):
        return self.group.recv([buffer], source, 0)

    def leave(self):
        """Close the connections, so that whoever sends sees it at once."""
        if self.group is not None:
            try:
                self.group.abort()
            except Exception:
                traceback.print_exc()
        self.group = self.name = self.rounds = None


class Payload:
    """What is under way from one rank in a round. Of a delta its sizes come first."""

    def __init__(self, receiver, parameters, message, whole):
        source, views = message["from"], [view(parameters, part) for part in message["parts"]]
        is_alone = [whole and v.nbytes >= receiver.alone_bytes for v in views]
        self.views = [v for v, alone in zip(views, is_alone, strict=True) if not alone]
        self.counts, extra = [WHOLE] * len(self.views), 0
        if not whole:
            header = torch.empty(len(self.views), dtype=torch.int32, device=receiver.device)
            receiver.take(header, source).wait(receiver.timeout)
            self.counts, extra = header.tolist(), header.nbytes
        places, values = sizes(self.counts, [v.numel() for v in self.views])
        itemsize = views[0].element_size()
        self.bytes = extra + 4 * places + itemsize * values
        self.buffer = torch.empty(4 * places + itemsize * values, dtype=torch.uint8, device=receiver.device)
        self.places, self.work = places, None
        if self.buffer.numel():
            self.work = receiver.take(self.buffer, source)
        self.alone = [Alone(receiver, v, source) for v, alone in zip(views, is_alone, strict=True) if alone]

    def write(self, timeout):
        """Into the parameters; returns the bytes that came."""
        if self.work is not None:
            self.work.wait(timeout)
            self.unpack()
        return self.bytes + sum(part.write(timeout) for part in self.alone)

    def unpack(self):
        places = self.buffer[: 4 * self.places].view(torch.int32)
        values = self.buffer[4 * self.places :].view(self.views[0].dtype)
        for target, count in zip(self.views, self.counts, strict=True):
            if count == WHOLE:
                now, values = values[: target.numel()], values[target.numel() :]
                target.copy_(now.view(target.shape))
            elif count:
                at, places = places[:count].long(), places[count:]
                now, values = values[:count], values[count:]
                target[torch.unravel_index(at, target.shape)] = now


class Alone:
    """A part that is a message of its own, straight into the parameter where it is in one piece there."""

    def __init__(self, receiver, target, source):
        self.target, self.buffer = target, target
        if not target.is_contiguous():
            self.buffer = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        self.work = receiver.take(self.buffer.view(-1).view(torch.uint8), source)

    def write(self, timeout):
        """The bytes that came."""
        self.work.wait(timeout)
        if self.buffer is not self.target:
            self.target.copy_(self.buffer)
        return self.buffer.nbytes


class Handles:
    """Receives as a process group does, out of memory of this machine that the sender hands over."""

    def __init__(self, store, rank):
        self.store, self.rank, self.taken = store, rank, {}

    def recv(self, tensors, source, tag):
        number = self.taken[source] = self.taken.get(source, -1) + 1
        return Handle(self.store, f"{source}>{self.rank}/{number}", tensors[0])

    def abort(self):
        """Nothing is open."""


class Handle:
    """A buffer that comes."""

    def __init__(self, store, key, target):
        self.store, self.key, self.target = store, key, target

    def wait(self, timeout):
        self.store.wait([self.key], timeout)
        self.target.copy_(pickle.loads(base64.b64decode(self.store.get(self.key))))
        if self.target.is_cuda:
            torch.cuda.current_stream().synchronize()
        self.store.set(f"{self.key}/taken", "")


def sizes(counts, numels):
    """How many places and how many values a message has."""
    places = sum(count for count in counts if count != WHOLE)
    return places, places + sum(n for count, n in zip(counts, numels, strict=True) if count == WHOLE)


def view(parameters, part):
    name, index, dim, start, stop = part
    tensor = parameters[name].data
    return (tensor if index is None else tensor[index]).narrow(dim, start, stop - start)


def check(parameters, manifest):
    """Zero the padding. Raises ValueError where this worker's parameters are not those of the manifest, or would not be
    filled."""
    found = {name: list(p.shape) for name, p in parameters.items()}
    told = manifest["shapes"]
    if found != told:
        odd = sorted(name for name in found.keys() | told if found.get(name) != told.get(name))
        raise ValueError(
            f"this worker holds {odd[0]} as {found.get(odd[0])}, by the plan it is {told.get(odd[0])};"
            f" {len(odd)} parameters differ"
        )
    dtypes = {str(p.dtype) for p in parameters.values()}
    if dtypes != {manifest["dtype"]}:
        raise ValueError(f"this worker holds {', '.join(sorted(dtypes))}, the trainer sends {manifest['dtype']}")
    filled = sum(view(parameters, part).numel() for r in manifest["rounds"] for m in r for part in m["parts"])
    padding = [view(parameters, part) for part in manifest["padding"]]
    held = sum(p.numel() for p in parameters.values())
    if filled + sum(p.numel() for p in padding) != held:
        raise ValueError(f"the plan fills {filled} entries of {held}, and zeros do not make up for the rest")
    for zeros in padding:
        zeros.zero_()


def joined(store, rank, size, timeout, host, device):
    """A process group that is registered nowhere: gloo, over the interface that reaches `host`, or NCCL."""
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host))]
    return dist.ProcessGroupGloo(store, rank, size, options)


def address_towards(host):
    """This machine's own address on the way to `host`."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return probe.getsockname()[0]


def _tp_rank():
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank
