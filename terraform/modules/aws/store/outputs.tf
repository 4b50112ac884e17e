output "ledger_disk" {
  description = "The ledger's volume, where it is self-hosted."
  value       = one(aws_ebs_volume.ledger[*].id)
}

output "managed_redis" {
  description = "Id and address of the managed ledger, where there is one."
  value = one([
    for group in aws_elasticache_replication_group.ledger : {
      id = group.replication_group_id, address = group.primary_endpoint_address
    }
  ])
}

output "node_ids" {
  description = "Instance of each store node."
  value       = { for name, node in aws_instance.node : name => node.id }
}
