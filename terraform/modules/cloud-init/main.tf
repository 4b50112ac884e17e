locals {
  infra = "${path.module}/../../../infra"

  programs = ["common", "cloud-${var.cloud}", "boot", "unit-failed", var.role == "worker" ? "worker" : "secrets"]

  units = {
    control-plane = ["secrets", "ledger", "head", "api", "controller"]
    store         = ["secrets", "tensors", "server"]
    worker        = ["worker"]
  }[var.role]

  configurations = {
    control-plane = { "ledger.conf" = "redis/ledger.conf", "nginx.conf" = "nginx/vcasgd.conf" }
    store         = { "tensors.conf" = "redis/tensors.conf" }
    worker        = {}
  }[var.role]

  scripts = merge(
    {
      for name in local.programs :
      "/usr/local/lib/vcasgd/${name}" => { mode = "0755", content = file("${local.infra}/bin/${name}") }
    },
    {
      for unit in concat([for name in local.units : "${name}.service"], ["unit-failed@.service"]) :
      "/etc/systemd/system/vcasgd-${unit}" => {
        mode = "0644", content = file("${local.infra}/systemd/vcasgd-${unit}")
      }
    },
  )

  worker = var.role == "worker" ? {
    "/etc/systemd/system/vcasgd-worker.path" = {
      mode = "0644", content = file("${local.infra}/systemd/vcasgd-worker.path")
    }
  } : {}

  machine = merge(var.machine, { ROLE = var.role, CLOUD = var.cloud })

  settings = {
    "/etc/vcasgd/machine.env" = {
      mode    = "0644"
      content = join("", [for name, value in local.machine : "${name}='${value}'\n"])
    }
    "/etc/vcasgd/vcasgd.env" = {
      mode    = "0644"
      content = join("", [for name, value in var.settings : "${name}=${value}\n"])
    }
  }

  configured = merge(
    { for name, source in local.configurations : "/etc/vcasgd/${name}" => {
      mode = "0644", content = file("${local.infra}/${source}")
    } },
    { for name, content in var.files : "/etc/vcasgd/${name}" => { mode = "0644", content = content } },
  )

  files = merge(local.scripts, local.worker, local.settings, local.configured)
}
