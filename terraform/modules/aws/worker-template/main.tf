locals {
  tags = { "vcasgd:cluster" = var.cluster, "vcasgd:pool" = var.pool }
}

# No instance type and no market: the controller sets both with each launch.
resource "aws_launch_template" "this" {
  name                   = "${var.cluster}-${var.pool}"
  description            = "machines of pool ${var.pool}"
  image_id               = var.image
  vpc_security_group_ids = [var.place.security_group_id]
  user_data              = base64encode(var.user_data)
  update_default_version = true

  # A worker that shuts down is terminated and no longer billed.
  instance_initiated_shutdown_behavior = "terminate"

  iam_instance_profile {
    name = var.place.profile
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  block_device_mappings {
    device_name = "/dev/sda1"

    ebs {
      volume_size           = var.disk_gb
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = ["instance", "volume"]

    content {
      resource_type = tag_specifications.value
      tags          = merge(local.tags, { Name = "${var.cluster}-${var.pool}" })
    }
  }
}
