"""The lighthouse over HTTP: connections, tokens, limits and routes. FastAPI on uvicorn, with the parts around it.

Replicas and supervisors have the job's token, people open the page with a key that only lets them look, and
strangers may reach the port. So a request passes these before a route sees it:

1. `connections` bounds how many connections are open, how slow they are and how large a request's head is. Until a
   request on it has shown a token, a connection is a stranger's and may be closed to make room.
2. `access.RequestGate` judges the token, the only time on the request's way, and bounds rate and size.
3. `quorum_route` counts the request. It answers POST /v1/quorum, which is on the path of every step, itself, and
   passes all others on to FastAPI's routing. In both, `access.Bearer` checks that the role may use the route.

The routes call `lighthouse.service` (decisions), `lighthouse.journal` (what happened) and nothing else. Every
error is ``{"detail": one line}``.

Read in this order:

- `app`: the application, and the operator's routes.
- `quorum_route`: POST /v1/quorum, and reading a body.
- `journal_routes`: telemetry, overview, log, stream, and the files of the page.
- `access`: roles and tokens, and the gate; `proofs`: who signed a request, and the MAC of its answer.
- `rate_limits`: how much one address may ask, and how large a request may be.
- `connections`: uvicorn's protocol with bounds.
- `metrics`: GET /metrics for Prometheus.

Nothing here decides about replicas, and `lighthouse.quorum` imports nothing of it.

Example: what a lighthouse serves while it leads is
``RequestGate(create_app(service, keys, journal, meter), keys, Rates())``.
"""
