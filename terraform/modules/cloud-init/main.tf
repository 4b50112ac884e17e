locals {
  infra = "${path.module}/../../../infra"

  # Machines of a cluster whose tensors servers have replicas know their addresses.
  replicated = lookup(var.machine, "REPLICA_HOSTS", "") != ""
  sentinel   = local.replicated ? ["sentinel"] : []

  # Machines elsewhere join a cluster with a gateway.
  gateway = lookup(var.machine, "JOIN", "") != "" ? ["gateway"] : []
  acme    = lookup(var.machine, "JOIN", "") == "acme" ? ["acme"] : []

  programs = concat(["common", "cloud-${var.cloud}", "boot", "unit-failed"], {
    control-plane = concat(["secrets", "certificate"], local.acme, local.sentinel)
    store         = concat(["secrets", "tensors"], local.sentinel)
    replica       = concat(["secrets", "tensors"], local.sentinel)
    worker        = ["worker"]
  }[var.role])

  units = {
    control-plane = concat(["secrets", "certificate", "ledger", "head", "api", "controller"], local.gateway, local.acme, local.sentinel)
    store         = concat(["secrets", "tensors", "server"], local.sentinel)
    replica       = concat(["secrets", "tensors"], local.sentinel)
    worker        = ["worker"]
  }[var.role]

  tensors = merge(
    { "tensors.conf" = "redis/tensors.conf" },
    local.replicated ? { "replication.conf" = "redis/replication.conf" } : {},
  )
  configurations = {
    control-plane = { "ledger.conf" = "redis/ledger.conf", "nginx.conf" = "nginx/vcasgd.conf" }
    store         = local.tensors
    replica       = local.tensors
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

  timers = {
    for unit in concat(var.role == "control-plane" ? ["certificate"] : [], local.acme) :
    "/etc/systemd/system/vcasgd-${unit}.timer" => {
      mode = "0644", content = file("${local.infra}/systemd/vcasgd-${unit}.timer")
    }
  }

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
    { "/etc/needrestart/conf.d/vcasgd.conf" = { mode = "0644", content = file("${local.infra}/needrestart/vcasgd.conf") } },
  )

  files = merge(local.scripts, local.timers, local.settings, local.configured)
}
