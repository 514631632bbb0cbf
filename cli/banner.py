"""What a person reads when it serves: addresses, settings, and lines to paste. Knows the facts it is given."""

import json
import shlex

from cli.report import EngineReport
from cli.settings import Params

_BEARER = ' -H "Authorization: Bearer $FULCRUM_API_KEY"'
_SETTINGS = ("scheduler", "prefix_cache", "chunked_prefill", "speculative", "service_workers")


def engine_banner(report: EngineReport, params: Params, name: str, *, with_key: bool) -> str:
    """For an engine alone."""
    return "\n".join((*_head(report, params, name), "", _grpcurl(report.address, params, with_key=with_key)))


def gateway_banner(address: str, engines: tuple[str, ...], params: Params) -> str:
    """For a gateway alone."""
    url = _url(address, params)
    addresses = {"page": url.removesuffix("v1"), "OpenAI API": url, "engines": ", ".join(engines)}
    return "\n".join(("Fulcrum gateway", *(f"  {name:<11} {address}" for name, address in addresses.items())))


def serve_banner(report: EngineReport, gateway: str, params: Params, name: str, *, with_key: bool) -> str:
    """For both together."""
    url = _url(gateway, params)
    trust = f" --cacert {shlex.quote(str(params['https_cert']))}" if params["https_cert"] else ""
    trust += " --cert CLIENT.pem --key CLIENT.key" if params["https_client_ca"] else ""
    headers = f"-H 'Content-Type: application/json'{_BEARER if with_key else ''}"
    body = {"model": name, "messages": [{"role": "user", "content": "Hello!"}]}
    return "\n".join(
        (
            *_head(report, params, name, f"  page        {url.removesuffix('v1')}", f"  OpenAI API  {url}"),
            "",
            f"  curl{trust} {url}/chat/completions {headers} -d {shlex.quote(json.dumps(body))}",
            _grpcurl(report.address, params, with_key=with_key),
            "",
            "Ctrl-C ends it, when running requests are done.",
        )
    )


def reachable(address: str) -> str:
    """The address as a client on this machine writes it: 0.0.0.0 and [::] are no places to call."""
    host, _, port = address.rpartition(":")
    return f"{ {'0.0.0.0': '127.0.0.1', '[::]': '[::1]'}.get(host, host) }:{port}"


def _head(report: EngineReport, params: Params, name: str, *addresses: str) -> list[str]:
    tokens = report.num_pages * report.page_size
    limits = {"max_num_seqs": report.max_num_seqs, "max_num_batched_tokens": report.max_num_batched_tokens}
    shown = limits | {key: params[key] for key in _SETTINGS}
    settings = ", ".join(f"{key.replace('_', '-')} {_text(value)}" for key, value in shown.items())
    lines = [f"Fulcrum serves {name}", *addresses, f"  gRPC        {report.address}"]
    lines.append(f"  admin       {report.admin_addresses[0]}")
    if report.metrics_address:
        scheme = "https" if params["tls_cert"] else "http"
        lines.append(f"  metrics     {scheme}://{reachable(report.metrics_address)}/metrics")
    return [
        *lines,
        f"  model       {report.architecture}, {report.dtype} on {report.device}",
        f"  window      {report.max_model_len:,} tokens",
        f"  KV cache    {tokens:,} tokens ({report.num_pages:,} pages of {report.page_size})",
        f"  settings    {settings}",
    ]


def _url(gateway: str, params: Params) -> str:
    return f"http{'s' if params['https_cert'] else ''}://{reachable(gateway)}/v1"


def _grpcurl(address: str, params: Params, *, with_key: bool) -> str:
    trust = f"-cacert {shlex.quote(str(params['tls_cert']))}" if params["tls_cert"] else "-plaintext"
    trust += " -cert CLIENT.pem -key CLIENT.key" if params["tls_client_ca"] else ""
    body = {"chat": {"messages": [{"role": "user", "content": [{"text": "Hello!"}]}]}}
    target = f"{reachable(address)} fulcrum.v1.InferenceService/Generate"
    return f"  grpcurl {trust}{_BEARER if with_key else ''} -d {shlex.quote(json.dumps(body))} {target}"


def _text(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
