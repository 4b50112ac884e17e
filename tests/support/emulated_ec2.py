"""EC2 over real HTTP: moto's server behind a proxy for features that moto does not emulate.

The proxy runs out of capacity by subnet, sets spot prices, and refuses chosen calls as EC2 would.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, urlencode

import boto3
import httpx
from moto.server import ThreadedMotoServer

from support.http_servers import LocalServer, QuietHandler

REGION = "us-east-1"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": REGION,
    # Ignore the machine's own configuration.
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    # Over a thousand images, whose loading takes most of a second.
    "MOTO_EC2_LOAD_DEFAULT_AMIS": "false",
}
#: Timeout in seconds for one call of moto, and for one that gets no answer.
CALL_SECONDS = 20.0
XMLNS = 'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"'


@dataclass
class EmulatedEc2:
    """Behavior of the proxy; tests change it at any time."""

    moto_url: str
    url: str = ""
    #: Subnets without capacity, and the error codes of their refusals.
    exhausted: dict[str, str] = field(default_factory=dict)
    #: Largest number of machines that one launch gets.
    room: int | None = None
    #: USD per hour by type and zone; a market without a price has no offers.
    prices: dict[tuple[str, str], float] = field(default_factory=dict)
    #: Refusals by action; each is returned once, in order.
    refusals: list[tuple[str, str, int]] = field(default_factory=list)
    #: Values of quotas by their codes; moto has none of EC2's.
    quotas: dict[str, float] = field(default_factory=dict)
    #: USD per hour by type in the price list; None if it may not be read.
    price_list: dict[str, float] | None = None
    #: Actions that are answered with the page of a proxy.
    garbled: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    #: While it is cleared, calls get no answer; ``waiting`` counts them.
    answers: threading.Event = field(default_factory=threading.Event)
    waiting: int = 0
    #: Called once after EC2 created machines, before the response.
    made: Callable[[], None] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.answers.set()

    def refuse(self, action: str, code: str, status: int = 400) -> None:
        with self.lock:
            self.refusals.append((action, code, status))

    def ec2(self) -> Any:
        """Return a client of the test, which bypasses the proxy."""
        return boto3.client(
            "ec2",
            region_name=REGION,
            endpoint_url=self.moto_url,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )

    def subnets(self) -> dict[str, str]:
        """Return the subnets by zone."""
        rows = self.ec2().describe_subnets()["Subnets"]
        return {row["AvailabilityZone"]: row["SubnetId"] for row in rows}

    def template(self, user_data: str = "") -> str:
        """Return the ID of a launch template."""
        data = {"ImageId": "ami-12345678", "InstanceType": "t3.micro"}
        if user_data:
            data["UserData"] = base64.b64encode(user_data.encode()).decode()
        name = f"workers-{uuid.uuid4()}"
        answer = self.ec2().create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)
        return str(answer["LaunchTemplate"]["LaunchTemplateId"])

    def alive(self) -> list[dict[str, Any]]:
        """Return all machines that cost money."""
        states = ["pending", "running", "stopping", "stopped"]
        answer = self.ec2().describe_instances(
            Filters=[{"Name": "instance-state-name", "Values": states}]
        )
        return [one for each in answer["Reservations"] for one in each["Instances"]]

    def user_data(self, instance_id: str) -> str:
        answer = self.ec2().describe_instance_attribute(
            InstanceId=instance_id, Attribute="userData"
        )
        return base64.b64decode(answer["UserData"]["Value"]).decode()

    # -- responses of the proxy itself ---------------------------------------------------------

    def answer(self, form: dict[str, str]) -> tuple[int, str] | None:
        """Return the proxy's response, or None to forward the changed form to moto."""
        action = form.get("Action", "")
        if not self.answers.is_set():
            with self.lock:
                self.waiting += 1
            self.answers.wait(CALL_SECONDS)
        with self.lock:
            self.calls.append(action)
            for index, (wanted, code, status) in enumerate(self.refusals):
                if wanted == action:
                    del self.refusals[index]
                    return status, _error(code)
        if action in self.garbled:
            return 200, "<html>Sign in<br></html>"
        if action == "CreateFleet":
            return self._narrow(form)
        if action == "DescribeSpotPriceHistory":
            return 200, self._price_history(form)
        return None

    def _narrow(self, form: dict[str, str]) -> tuple[int, str] | None:
        subnets = {
            match[0]: value
            for key, value in form.items()
            if (match := re.match(r"LaunchTemplateConfigs\.1\.Overrides\.\d+\.", key))
            and key.endswith("SubnetId")
        }
        without = [prefix for prefix, subnet in subnets.items() if subnet in self.exhausted]
        if (subnets and len(without) == len(subnets)) or self.room == 0:
            codes = sorted(set(self.exhausted.values())) or ["InsufficientInstanceCapacity"]
            return 200, _no_fleet(codes)
        self._leave_out(form, without)
        if self.room is not None:
            key = "TargetCapacitySpecification.TotalTargetCapacity"
            form[key] = str(min(self.room, int(form[key])))
        return None

    def _leave_out(self, form: dict[str, str], without: list[str]) -> None:
        """Remove an entry and renumber the others, because a list has no gaps."""
        start = "LaunchTemplateConfigs.1.Overrides."
        overrides: dict[str, dict[str, str]] = {}
        for key in [key for key in form if key.startswith(start)]:
            number, _, name = key.removeprefix(start).partition(".")
            overrides.setdefault(number, {})[name] = form.pop(key)
        kept = [rows for number, rows in overrides.items() if f"{start}{number}." not in without]
        for number, rows in enumerate(kept, 1):
            form.update({f"{start}{number}.{name}": value for name, value in rows.items()})

    def _price_history(self, form: dict[str, str]) -> str:
        kinds = {value for key, value in form.items() if key.startswith("InstanceType.")}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        rows = "".join(
            f"<item><instanceType>{kind}</instanceType><availabilityZone>{zone}</availabilityZone>"
            "<productDescription>Linux/UNIX</productDescription>"
            f"<spotPrice>{price:.6f}</spotPrice><timestamp>{now}</timestamp></item>"
            for (kind, zone), price in self.prices.items()
            if kind in kinds
        )
        return (
            f"<DescribeSpotPriceHistoryResponse {XMLNS}>"
            f"<spotPriceHistorySet>{rows}</spotPriceHistorySet>"
            "</DescribeSpotPriceHistoryResponse>"
        )


def _error(code: str) -> str:
    return (
        f"<Response><Errors><Error><Code>{code}</Code><Message>refused by the test</Message>"
        "</Error></Errors><RequestID>0</RequestID></Response>"
    )


def _no_fleet(codes: list[str]) -> str:
    errors = "".join(
        f"<item><errorCode>{code}</errorCode><errorMessage>refused by the test</errorMessage>"
        "<lifecycle>spot</lifecycle></item>"
        for code in codes
    )
    return (
        f"<CreateFleetResponse {XMLNS}><fleetId>fleet-0</fleetId><errorSet>{errors}</errorSet>"
        "<fleetInstanceSet/></CreateFleetResponse>"
    )


class _Proxy(LocalServer):
    def __init__(self, ec2: EmulatedEc2) -> None:
        super().__init__(_Handler)
        self.ec2 = ec2


class _Handler(QuietHandler):
    server: _Proxy
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.body()
        if "x-www-form-urlencoded" in self.headers.get("Content-Type", ""):
            form = dict(parse_qsl(body.decode(), keep_blank_values=True))
            own = self.server.ec2.answer(form)
            if own is not None:
                self.answer(*own, Content_Type="text/xml")
                return
            body = urlencode(form).encode()
            answer = self._forward(body)
            if form.get("Action") == "CreateFleet":
                self._call_made()
            self._send(*answer)
            return
        if self.headers.get("X-Amz-Target", "").endswith(".GetServiceQuota"):
            code = json.loads(body)["QuotaCode"]
            if code in self.server.ec2.quotas:
                quota = {"QuotaCode": code, "Value": self.server.ec2.quotas[code]}
                answer = json.dumps({"Quota": quota}).encode()
                self._send(200, answer, "application/x-amz-json-1.1")
                return
        if self.headers.get("X-Amz-Target", "").endswith(".GetProducts"):
            self._send(*self._products(json.loads(body)))
            return
        self._send(*self._forward(body))

    def _products(self, request: dict[str, Any]) -> tuple[int, bytes, str]:
        prices, kind = self.server.ec2.price_list, "application/x-amz-json-1.1"
        if prices is None:
            refusal = {"__type": "AccessDeniedException", "Message": "not allowed"}
            return 400, json.dumps(refusal).encode(), kind
        wanted = {row["Field"]: row["Value"] for row in request["Filters"]}
        assert wanted["regionCode"] == REGION
        price = prices.get(wanted["instanceType"])
        dimension = {"unit": "Hrs", "pricePerUnit": {"USD": f"{price or 0:.10f}"}}
        term = {"priceDimensions": {"x.JRTCKXETXF.6YS6EN2CT7": dimension}}
        product = {"terms": {"OnDemand": {"x.JRTCKXETXF": term}}}
        found = [] if price is None else [json.dumps(product)]
        return 200, json.dumps({"PriceList": found, "FormatVersion": "aws_v1"}).encode(), kind

    def _call_made(self) -> None:
        ec2 = self.server.ec2
        with ec2.lock:
            made, ec2.made = ec2.made, None
        if made is not None:
            made()

    def _forward(self, body: bytes) -> tuple[int, bytes, str]:
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower() not in ("host", "content-length", "connection")
        }
        url = self.server.ec2.moto_url + self.path
        with httpx.Client(trust_env=False, timeout=CALL_SECONDS) as client:
            answer = client.post(url, content=body, headers=headers)
        return answer.status_code, answer.content, answer.headers.get("Content-Type", "text/xml")

    def _send(self, status: int, payload: bytes, kind: str) -> None:
        self.answer(status, payload, Content_Type=kind)


@contextmanager
def emulated_ec2() -> Iterator[EmulatedEc2]:
    """Provide a fresh EC2. Its state is moto's, which a whole process shares."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    ec2 = EmulatedEc2(f"http://{host}:{port}")
    with _Proxy(ec2) as proxy:
        ec2.url = proxy.url
        httpx.post(f"{ec2.moto_url}/moto-api/reset", trust_env=False, timeout=120)
        yield ec2
    moto.stop()
