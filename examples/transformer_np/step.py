"""One training step: forward, backward, clipping and AdamW; eager, or replayed from a CUDA graph.

Nothing in it waits for the GPU, so a graph can hold all of it. Its results stay on the device until they are asked for.
"""

import torch


class Step:
    """Trains a model on batches of one shape.

    In bf16 and fp16, the model's parameters are copies of fp32 ones, which the optimizer keeps. fp16 scales the loss, and
    a step whose gradients overflow changes nothing but the scale.
    """

    def __init__(self, model, device="cpu", dtype=torch.float32, lr=1e-3, clip=1.0, graph=False):
        device = torch.device(device)
        self.model, self.clip, self.graph = model.to(device), clip, None
        self.given = list(model.parameters())
        self.masters = [p.detach().clone().requires_grad_() for p in self.given] if dtype != torch.float32 else self.given
        for p in self.given:
            p.data = p.data.to(dtype)
        cuda = device.type == "cuda"
        # A graph reads the learning rate from the device.
        self.lr = torch.tensor(float(lr), device=device)
        self.optimizer = torch.optim.AdamW(self.masters, lr=self.lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True,
                                           capturable=cuda)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16, init_scale=2.0**12)
        self.wants_graph = graph
        if graph and not cuda:
            raise ValueError("a CUDA graph needs a CUDA device")

    def _gradients(self, x, y, context):
        for p in self.given:
            p.grad = None
        if self.masters is not self.given:
            with torch.no_grad():
                torch._foreach_copy_(self.given, self.masters)
        loss = self.model(x, y, context)
        self.scaler.scale(loss).backward()
        if self.masters is not self.given:
            for p in self.masters:
                if p.grad is None:
                    p.grad = torch.empty_like(p)
            torch._foreach_copy_([p.grad for p in self.masters], [p.grad for p in self.given])
        return loss.detach()

    def _update(self):
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.clip, foreach=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm

    def _step(self, x, y, context):
        loss = self._gradients(x, y, context)
        return loss, self._update()

    def _capture(self, x, y, context):
        self.context, self.inputs = context, (x.clone(), y.clone())
        # The first step compiles kernels and makes what the optimizer keeps; what it trains is taken back.
        before = self.state()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(*self.inputs, context)
        torch.cuda.current_stream().wait_stream(stream)
        self.load(before)
        del before
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = self._step(*self.inputs, context)

    def __call__(self, x, y, context, lr=None):
        """(the loss, the gradient's norm before clipping), on the device. x, y: fp32 [B, M + N], context: M."""
        if lr is not None:
            self.lr.fill_(lr)
        if not self.wants_graph:
            return self._step(x, y, context)
        if self.graph is None:
            self._capture(x, y, context)
        if context != self.context or x.shape != self.inputs[0].shape:
            raise ValueError("a captured step is for batches of one shape")
        for mine, given in zip(self.inputs, (x, y)):
            mine.copy_(given)
        self.graph.replay()
        return tuple(t.clone() for t in self.results)

    @torch.no_grad()
    def loss(self, x, y, context):
        if self.masters is not self.given:
            torch._foreach_copy_(self.given, self.masters)
        return self.model(x, y, context)

    def state(self):
        """Copies of all that a step changes."""
        names = [name for name, _ in self.model.named_parameters()]
        moments = [{name: t.clone() for name, t in self.optimizer.state.get(p, {}).items()} for p in self.masters]
        return {"parameters": {n: p.detach().clone() for n, p in zip(names, self.masters)}, "moments": moments,
                "scaler": self.scaler.state_dict()}

    @torch.no_grad()
    def load(self, state):
        for p, saved, moments in zip(self.masters, state["parameters"].values(), state["moments"]):
            p.copy_(saved)
            own = self.optimizer.state[p]
            for name in set(own) | set(moments):
                if name not in own:
                    own[name] = moments[name].to(p.device).clone()
                elif name in moments:
                    own[name].copy_(moments[name])  # in place: a graph may hold its address
                else:
                    own[name].zero_()
        if self.scaler.is_enabled():
            if self.scaler._scale is None:
                self.scaler.load_state_dict(state["scaler"])
            else:
                self.scaler._scale.fill_(state["scaler"]["scale"])
                self.scaler._growth_tracker.fill_(state["scaler"]["_growth_tracker"])
