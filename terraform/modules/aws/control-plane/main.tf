data "aws_caller_identity" "me" {}

data "aws_region" "here" {}

data "aws_partition" "here" {}

locals {
  ec2 = "arn:${data.aws_partition.here.partition}:ec2:${data.aws_region.here.name}:${data.aws_caller_identity.me.account_id}"
}

# Permissions to buy and terminate machines. Only machines with the cluster's tag can be
# terminated, and the control plane and the store don't have it.
data "aws_iam_policy_document" "fleet" {
  statement {
    sid = "Look"
    actions = [
      "ec2:DescribeInstances",
      "ec2:DescribeLaunchTemplateVersions",
      "ec2:DescribeSpotPriceHistory",
      "pricing:GetProducts",
      "servicequotas:GetServiceQuota",
    ]
    # These actions don't support resource-level permissions.
    resources = ["*"]
  }

  statement {
    sid       = "LaunchTagged"
    actions   = ["ec2:CreateFleet", "ec2:RunInstances"]
    resources = ["${local.ec2}:fleet/*", "${local.ec2}:instance/*"]

    condition {
      test     = "StringEquals"
      variable = "aws:RequestTag/vcasgd:cluster"
      values   = [var.cluster]
    }
  }

  statement {
    sid       = "LaunchFromOurTemplates"
    actions   = ["ec2:CreateFleet", "ec2:RunInstances"]
    resources = [for id in var.fleet.launch_template_ids : "${local.ec2}:launch-template/${id}"]
  }

  statement {
    sid     = "LaunchWith"
    actions = ["ec2:CreateFleet", "ec2:RunInstances"]
    resources = concat(
      [
        "arn:${data.aws_partition.here.partition}:ec2:${data.aws_region.here.name}::image/*",
        "${local.ec2}:image/*",
        "${local.ec2}:network-interface/*",
        "${local.ec2}:spot-instances-request/*",
        "${local.ec2}:volume/*",
      ],
      [for id in var.fleet.subnet_ids : "${local.ec2}:subnet/${id}"],
      ["${local.ec2}:security-group/${var.fleet.security_group_id}"],
    )
  }

  statement {
    sid       = "TagWhileLaunching"
    actions   = ["ec2:CreateTags"]
    resources = ["${local.ec2}:fleet/*", "${local.ec2}:instance/*", "${local.ec2}:volume/*"]

    condition {
      test     = "StringEquals"
      variable = "ec2:CreateAction"
      values   = ["CreateFleet", "RunInstances"]
    }
  }

  statement {
    sid       = "EndTagged"
    actions   = ["ec2:TerminateInstances"]
    resources = ["${local.ec2}:instance/*"]

    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/vcasgd:cluster"
      values   = [var.cluster]
    }
  }

  statement {
    sid       = "LendWorkersTheirRole"
    actions   = ["iam:PassRole"]
    resources = [var.fleet.role_arn]

    condition {
      test     = "StringEquals"
      variable = "iam:PassedToService"
      values   = ["ec2.amazonaws.com"]
    }
  }

  statement {
    sid       = "FirstSpotInstanceOfTheAccount"
    actions   = ["iam:CreateServiceLinkedRole"]
    resources = ["arn:${data.aws_partition.here.partition}:iam::${data.aws_caller_identity.me.account_id}:role/aws-service-role/*"]

    condition {
      test     = "StringEquals"
      variable = "iam:AWSServiceName"
      values   = ["ec2fleet.amazonaws.com", "spot.amazonaws.com"]
    }
  }
}

resource "aws_iam_role_policy" "fleet" {
  name   = "vcasgd-fleet"
  role   = var.place.role
  policy = data.aws_iam_policy_document.fleet.json
}

resource "terraform_data" "user_data" {
  input = sha256(var.user_data)
}

resource "aws_instance" "this" {
  ami                    = var.image
  instance_type          = var.instance_type
  subnet_id              = var.place.subnet_id
  private_ip             = var.place.private_address
  vpc_security_group_ids = [var.place.security_group_id]
  iam_instance_profile   = var.place.profile
  user_data_base64       = base64gzip(var.user_data)

  # The ledger has its own disk; everything else is created again.
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

  # Without the tag vcasgd:cluster, which marks machines that the controller may terminate.
  tags = { Name = "${var.cluster}-control", "vcasgd:stack" = var.cluster }

  lifecycle {
    # A new system image is no reason to replace a working machine.
    ignore_changes = [ami]
    # The option above fails where a part of the data, such as a new pool's template, has no ID before the apply.
    replace_triggered_by = [terraform_data.user_data]
  }
}

resource "aws_volume_attachment" "ledger" {
  instance_id = aws_instance.this.id
  volume_id   = var.ledger_disk
  device_name = "/dev/sdf"
  # The append-only file must be closed before the disk is detached.
  stop_instance_before_detaching = true
}

resource "aws_eip_association" "api" {
  count = var.public_address.attached ? 1 : 0

  instance_id   = aws_instance.this.id
  allocation_id = var.public_address.id
}
