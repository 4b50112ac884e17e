locals {
  managed   = var.redis == "managed"
  backed_up = !local.managed && var.backup.days > 0
  owned     = { "vcasgd:stack" = var.cluster }
}

# Separate from the machine that uses it, so that it survives the machine. Next to a managed ledger, it has the authority
# of the API's certificate.
resource "aws_ebs_volume" "ledger" {
  availability_zone = var.zone
  size              = var.disk.size_gb
  type              = "gp3"
  encrypted         = true
  final_snapshot    = var.disk.final_snapshot
  snapshot_id       = var.backup.restore

  tags = merge(local.owned, { Name = "${var.cluster}-ledger", "vcasgd:ledger" = var.cluster })

  lifecycle {
    # Only a new disk is made from a snapshot; a change of the variable must not replace a live one.
    ignore_changes = [snapshot_id]
  }
}

data "aws_iam_policy_document" "backup_service" {
  count = local.backed_up ? 1 : 0

  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["dlm.amazonaws.com"]
    }
  }
}

data "aws_iam_policy_document" "backup" {
  count = local.backed_up ? 1 : 0

  # Snapshots are made and deleted by tag, and these actions have no names of resources in advance.
  statement {
    actions = [
      "ec2:CreateSnapshot",
      "ec2:CreateSnapshots",
      "ec2:DeleteSnapshot",
      "ec2:DescribeInstances",
      "ec2:DescribeSnapshots",
      "ec2:DescribeVolumes",
    ]
    resources = ["*"]
  }

  statement {
    actions   = ["ec2:CreateTags"]
    resources = ["arn:*:ec2:*::snapshot/*"]
  }
}

resource "aws_iam_role" "backup" {
  count = local.backed_up ? 1 : 0

  name               = "${var.cluster}-backup"
  description        = "daily snapshots of the ledger's disk"
  assume_role_policy = data.aws_iam_policy_document.backup_service[0].json
}

resource "aws_iam_role_policy" "backup" {
  count = local.backed_up ? 1 : 0

  name   = "vcasgd"
  role   = aws_iam_role.backup[0].id
  policy = data.aws_iam_policy_document.backup[0].json
}

# A snapshot is as consistent as the disk after a power failure, which the append-only file survives.
resource "aws_dlm_lifecycle_policy" "ledger" {
  count = local.backed_up ? 1 : 0

  description        = "daily snapshots of the ledger of ${var.cluster}"
  execution_role_arn = aws_iam_role.backup[0].arn
  state              = "ENABLED"

  policy_details {
    resource_types = ["VOLUME"]
    target_tags    = { "vcasgd:ledger" = var.cluster }

    schedule {
      name      = "daily"
      copy_tags = true

      create_rule {
        interval      = 24
        interval_unit = "HOURS"
        times         = ["03:17"]
      }

      retain_rule {
        count = var.backup.days
      }
    }
  }
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

resource "terraform_data" "user_data" {
  for_each = var.nodes.machines

  input = sha256(each.value.user_data)
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
    # The option above fails where a part of the data, such as a new ledger's address, is not known before the apply.
    replace_triggered_by = [terraform_data.user_data[each.key]]
  }
}
