locals {
  labels = { "vcasgd-cluster" = var.cluster, "vcasgd-pool" = var.pool }
}

# Templates are immutable: a new one is created first, under another name.
resource "google_compute_region_instance_template" "this" {
  name_prefix  = "${var.cluster}-${var.pool}-"
  description  = "machines of pool ${var.pool}"
  region       = var.region
  machine_type = var.machine.default_type
  labels       = local.labels

  disk {
    source_image = var.machine.image
    disk_size_gb = var.machine.disk_gb
    disk_type    = "pd-balanced"
    boot         = true
    auto_delete  = true
    labels       = local.labels
  }

  network_interface {
    subnetwork = var.place.subnetwork_id

    dynamic "access_config" {
      for_each = var.private ? [] : [true]
      content {}
    }
  }

  service_account {
    email  = var.place.account
    scopes = ["cloud-platform"]
  }

  dynamic "guest_accelerator" {
    for_each = var.machine.accelerator == null ? [] : [var.machine.accelerator]

    content {
      type  = guest_accelerator.value.type
      count = guest_accelerator.value.count
    }
  }

  # Machines with GPUs can't be moved while they run.
  dynamic "scheduling" {
    for_each = var.machine.gpus > 0 ? [true] : []

    content {
      on_host_maintenance = "TERMINATE"
      automatic_restart   = false
    }
  }

  # NVIDIA's driver is usually built for the image, and not signed by Canonical.
  shielded_instance_config {
    enable_secure_boot = coalesce(var.machine.secure_boot, var.machine.gpus == 0)
  }

  metadata = {
    user-data               = var.user_data
    enable-guest-attributes = "TRUE"
  }

  lifecycle {
    create_before_destroy = true
  }
}
