locals {
  managed = var.redis == "managed"
  owned   = { "vcasgd:stack" = var.cluster }
}

# Separate from the machine that uses it, so that it survives the machine.
resource "aws_ebs_volume" "ledger" {
  count = local.managed ? 0 : 1

  availability_zone = var.zone
  size              = var.disk.size_gb
  type              = "gp3"
  encrypted         = true
  final_snapshot    = var.disk.final_snapshot

  tags = merge(local.owned, { Name = "${var.cluster}-ledger" })
}

resource "aws_elasticache_subnet_group" "ledger" {
  count = local.managed ? 1 : 0

  name       = "${var.cluster}-ledger"
  subnet_ids = var.subnet_ids
}

resource "aws_elasticache_parameter_group" "ledger" {
  count = local.managed ? 1 : 0

  name        = "${var.cluster}-ledger"
  family      = "redis7"
  description = "never evict keys"

  parameter {
    name  = "maxmemory-policy"
    value = "noeviction"
  }
}

# The control plane creates its token at its first start. Until then, only the security group
# protects it.
resource "aws_elasticache_replication_group" "ledger" {
  count = local.managed ? 1 : 0

  replication_group_id       = "${var.cluster}-ledger"
  description                = "the ledger of ${var.cluster}"
  engine                     = "redis"
  engine_version             = "7.1"
  node_type                  = var.managed_node_type
  num_cache_clusters         = 2
  automatic_failover_enabled = true
  multi_az_enabled           = length(var.subnet_ids) > 1
  at_rest_encryption_enabled = true
  transit_encryption_enabled = true
  parameter_group_name       = aws_elasticache_parameter_group.ledger[0].name
  subnet_group_name          = aws_elasticache_subnet_group.ledger[0].name
  security_group_ids         = [var.security_groups.managed]
  apply_immediately          = true

  tags = local.owned

  lifecycle {
    ignore_changes = [auth_token, auth_token_update_strategy, engine_version]
  }
}

resource "aws_instance" "node" {
  for_each = var.nodes.machines

  ami                    = var.nodes.image
  instance_type          = var.nodes.instance_type
  subnet_id              = var.subnet_ids[0]
  private_ip             = each.value.address
  vpc_security_group_ids = [var.security_groups.store]
  iam_instance_profile   = var.nodes.profile
  user_data_base64       = base64gzip(each.value.user_data)

  user_data_replace_on_change = true

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  root_block_device {
    volume_type = "gp3"
    volume_size = 30
    encrypted   = true
  }

  tags = merge(local.owned, { Name = "${var.cluster}-${each.key}" })

  lifecycle {
    # A new system image is no reason to replace a working machine.
    ignore_changes = [ami]
  }
}
