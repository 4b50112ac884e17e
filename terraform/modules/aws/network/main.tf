data "aws_region" "here" {}

resource "aws_vpc" "this" {
  cidr_block           = var.cidr
  enable_dns_hostnames = true

  tags = { Name = var.cluster }
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id

  tags = { Name = var.cluster }
}

# By default, machines have public addresses to reach package indexes and the cloud without a gateway,
# which would cost as much as a worker. The security groups deny all other incoming traffic.
resource "aws_subnet" "this" {
  for_each = { for index, zone in var.zones : zone => index }

  vpc_id                  = aws_vpc.this.id
  availability_zone       = each.key
  cidr_block              = cidrsubnet(var.cidr, 4, each.value)
  map_public_ip_on_launch = !var.private

  tags = { Name = "${var.cluster}-${each.key}" }
}

resource "aws_route_table" "this" {
  vpc_id = aws_vpc.this.id

  tags = { Name = var.cluster }
}

resource "aws_route" "out" {
  route_table_id         = aws_route_table.this.id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = var.private ? null : aws_internet_gateway.this.id
  nat_gateway_id         = one(aws_nat_gateway.this[*].id)
}

# The gateway of a private network, in a subnet of its own.
resource "aws_subnet" "gateway" {
  count = var.private ? 1 : 0

  vpc_id            = aws_vpc.this.id
  availability_zone = var.zones[0]
  cidr_block        = cidrsubnet(var.cidr, 4, 15)

  tags = { Name = "${var.cluster}-gateway" }
}

resource "aws_route_table" "gateway" {
  count = var.private ? 1 : 0

  vpc_id = aws_vpc.this.id

  route {
    cidr_block = "0.0.0.0/0"
    gateway_id = aws_internet_gateway.this.id
  }

  tags = { Name = "${var.cluster}-gateway" }
}

resource "aws_route_table_association" "gateway" {
  count = var.private ? 1 : 0

  route_table_id = aws_route_table.gateway[0].id
  subnet_id      = aws_subnet.gateway[0].id
}

resource "aws_eip" "gateway" {
  count = var.private ? 1 : 0

  domain = "vpc"

  tags = { Name = "${var.cluster}-gateway" }

  depends_on = [aws_internet_gateway.this]
}

resource "aws_nat_gateway" "this" {
  count = var.private ? 1 : 0

  allocation_id = aws_eip.gateway[0].id
  subnet_id     = aws_subnet.gateway[0].id

  tags = { Name = var.cluster }

  depends_on = [aws_route_table_association.gateway]
}

resource "aws_route_table_association" "this" {
  for_each = aws_subnet.this

  route_table_id = aws_route_table.this.id
  subnet_id      = each.value.id
}

# Object storage without traffic through the internet and its price.
resource "aws_vpc_endpoint" "storage" {
  vpc_id          = aws_vpc.this.id
  service_name    = "com.amazonaws.${data.aws_region.here.name}.s3"
  route_table_ids = [aws_route_table.this.id]

  tags = { Name = "${var.cluster}-storage" }
}

resource "aws_security_group" "this" {
  for_each = {
    control = "API, ledger, Ray head, controller"
    store   = "tensors servers and parameter servers"
    worker  = "machines of the fleet"
    managed = "managed Redis"
  }

  name        = "${var.cluster}-${each.key}"
  description = each.value
  vpc_id      = aws_vpc.this.id

  tags = { Name = "${var.cluster}-${each.key}" }
}

resource "aws_vpc_security_group_egress_rule" "out" {
  for_each = { for name in ["control", "store", "worker"] : name => aws_security_group.this[name].id }

  security_group_id = each.value
  description       = "package indexes, the cloud, each other"
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "-1"
}

resource "aws_vpc_security_group_ingress_rule" "api" {
  for_each = toset(var.api_cidrs)

  security_group_id = aws_security_group.this["control"].id
  description       = "the API, with TLS"
  cidr_ipv4         = each.value
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

resource "aws_vpc_security_group_ingress_rule" "gateway" {
  for_each = toset(try(var.gateway.cidrs, []))

  security_group_id = aws_security_group.this["control"].id
  description       = "machines that join, with TLS"
  cidr_ipv4         = each.value
  ip_protocol       = "tcp"
  from_port         = var.gateway.port
  to_port           = var.gateway.port
}

# Authorities don't say from where they look.
resource "aws_vpc_security_group_ingress_rule" "acme" {
  count = try(var.gateway.acme, false) ? 1 : 0

  security_group_id = aws_security_group.this["control"].id
  description       = "certificate authority of the gateway"
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 80
  to_port           = 80
}

locals {
  # Ray's processes choose their ports; ports below 1024 stay closed.
  inside = {
    ledger-from-store   = { to = "control", from = "store", first = 6379, last = 6379 }
    ledger-from-worker  = { to = "control", from = "worker", first = 6379, last = 6379 }
    ray-from-worker     = { to = "control", from = "worker", first = 10000, last = 65535 }
    ray-to-worker       = { to = "worker", from = "control", first = 1024, last = 65535 }
    ray-among-workers   = { to = "worker", from = "worker", first = 1024, last = 65535 }
    tensors-from-worker = { to = "store", from = "worker", first = 6380, last = 6380 }
    tensors-from-ours   = { to = "store", from = "control", first = 6380, last = 6380 }
    managed-from-ours   = { to = "managed", from = "control", first = 6379, last = 6379 }
    managed-from-store  = { to = "managed", from = "store", first = 6379, last = 6379 }
    managed-from-worker = { to = "managed", from = "worker", first = 6379, last = 6379 }
  }
  # Between a server and its replica, and from and to the Sentinels that monitor both.
  replicas = var.replicated ? {
    tensors-from-store   = { to = "store", from = "store", first = 6380, last = 6380 }
    sentinel-from-store  = { to = "store", from = "store", first = 26379, last = 26379 }
    sentinel-from-ours   = { to = "store", from = "control", first = 26379, last = 26379 }
    sentinel-from-worker = { to = "store", from = "worker", first = 26379, last = 26379 }
    ours-from-store      = { to = "control", from = "store", first = 26379, last = 26379 }
  } : {}
}

resource "aws_vpc_security_group_ingress_rule" "inside" {
  for_each = merge(local.inside, local.replicas)

  security_group_id            = aws_security_group.this[each.value.to].id
  referenced_security_group_id = aws_security_group.this[each.value.from].id
  ip_protocol                  = "tcp"
  from_port                    = each.value.first
  to_port                      = each.value.last

  tags = { Name = each.key }
}
