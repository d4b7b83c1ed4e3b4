"""Whether limits hold when several gateways share them: what passed, against the stated bound.

    python -m bench.limits [--seconds S] [--dry]

`processes` runs the limiter itself in processes that ask for more than there is (`load` is one of
them, `tenant` whose limits they share), `gateways` whole gateways; `journal` is what a process says
of each request, `windows` the arithmetic; `trips` counts what a request costs Redis.
"""
