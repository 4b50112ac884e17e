# Images of workers with everything installed, which boot in a fraction of the time.
#
#   packer init infra/packer
#   packer build -only 'amazon-ebs.*' -var wheel=dist/vcasgd-0.2.0-py3-none-any.whl infra/packer
#   packer build -only 'googlecompute.*' -var project=my-project-123 -var wheel=… infra/packer
#
# Name the image in the image of a pool. With gpu=true it has NVIDIA's driver and torch with CUDA.

packer {
  required_version = ">= 1.11"

  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = "~> 1.3"
    }
    googlecompute = {
      source  = "github.com/hashicorp/googlecompute"
      version = "~> 1.1"
    }
  }
}

variable "wheel" {
  description = "The wheel that terraform uploads, on this computer."
  type        = string
}

variable "constraints" {
  description = "Versions of what it needs."
  type        = string
  default     = "constraints-runtime.txt"
}

variable "python_packages" {
  description = "Packages that jobs import, as in the variable python_packages of terraform."
  type        = list(string)
  default     = []
}

variable "gpu" {
  description = "Install NVIDIA's driver, and torch with CUDA."
  type        = bool
  default     = false
}

variable "region" {
  description = "AWS region."
  type        = string
  default     = "us-east-1"
}

variable "project" {
  description = "Google Cloud project."
  type        = string
  default     = ""
}

variable "zone" {
  description = "Google Cloud zone."
  type        = string
  default     = "us-central1-a"
}

locals {
  name = "vcasgd-worker-${var.gpu ? "gpu" : "cpu"}-${formatdate("YYYYMMDD-hhmm", timestamp())}"
  disk = var.gpu ? 30 : 15
}

source "amazon-ebs" "worker" {
  region        = var.region
  instance_type = "c6i.xlarge"
  ssh_username  = "ubuntu"
  ami_name      = local.name
  encrypt_boot  = true

  source_ami_filter {
    owners      = ["099720109477"] # Canonical
    most_recent = true
    filters = {
      name                = "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-*"
      root-device-type    = "ebs"
      virtualization-type = "hvm"
    }
  }

  launch_block_device_mappings {
    device_name           = "/dev/sda1"
    volume_size           = local.disk
    volume_type           = "gp3"
    delete_on_termination = true
  }

  metadata_options {
    http_tokens = "required"
  }
}

source "googlecompute" "worker" {
  project_id          = var.project
  zone                = var.zone
  machine_type        = "n2-standard-4"
  source_image_family = "ubuntu-2404-lts-amd64"
  ssh_username        = "packer"
  image_name          = local.name
  image_family        = "vcasgd-worker-${var.gpu ? "gpu" : "cpu"}"
  disk_size           = local.disk
}

build {
  sources = ["source.amazon-ebs.worker", "source.googlecompute.worker"]

  provisioner "file" {
    source      = var.wheel
    destination = "/tmp/${basename(var.wheel)}"
  }

  provisioner "file" {
    source      = var.constraints
    destination = "/tmp/constraints.txt"
  }

  provisioner "shell" {
    script          = "${path.root}/install"
    execute_command = "sudo env {{ .Vars }} bash {{ .Path }} ${source.type == "amazon-ebs" ? "aws" : "gcp"}"
    env = {
      WHEEL        = "/tmp/${basename(var.wheel)}"
      CONSTRAINTS  = "/tmp/constraints.txt"
      PIP_OPTIONS  = var.gpu ? "" : "--extra-index-url https://download.pytorch.org/whl/cpu"
      PIP_PACKAGES = join(" ", var.python_packages)
      GPU          = tostring(var.gpu)
    }
  }
}
