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

    access_config {}
  }

  service_account {
    email  = var.place.account
    scopes = ["cloud-platform"]
  }

  shielded_instance_config {
    enable_secure_boot = true
  }

  metadata = {
    user-data               = var.user_data
    enable-guest-attributes = "TRUE"
  }

  lifecycle {
    create_before_destroy = true
  }
}
