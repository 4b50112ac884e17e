resource "terraform_data" "user_data" {
  input = sha256(var.user_data)
}

resource "google_compute_instance" "this" {
  name         = "${var.cluster}-control"
  zone         = var.place.zone
  machine_type = var.machine.type
  # Without the label vcasgd-cluster, which marks machines that the controller may terminate.
  labels = { "vcasgd-stack" = var.cluster }

  boot_disk {
    initialize_params {
      image = var.machine.image
      size  = 30
      type  = "pd-balanced"
    }
  }

  attached_disk {
    source      = var.ledger_disk
    device_name = "ledger"
  }

  network_interface {
    subnetwork = var.place.subnetwork_id
    network_ip = var.place.private_address

    dynamic "access_config" {
      for_each = var.private ? [] : [true]

      content {
        nat_ip = var.public_address
      }
    }
  }

  service_account {
    email  = var.place.account
    scopes = ["cloud-platform"]
  }

  # For a new machine type.
  allow_stopping_for_update = true

  shielded_instance_config {
    enable_secure_boot = true
  }

  metadata = {
    user-data               = var.user_data
    enable-guest-attributes = "TRUE"
    enable-oslogin          = "TRUE"
  }

  lifecycle {
    # cloud-init reads its data once. The ledger has its own disk; everything else is created again.
    replace_triggered_by = [terraform_data.user_data]
  }
}
