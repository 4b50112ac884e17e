output "ledger_disk" {
  description = "Volume of the ledger, or of the API's certificate authority alone."
  value       = aws_ebs_volume.ledger.id
}

output "managed_redis" {
  description = "ID and address of the managed ledger, or null."
  value = one([
    for group in aws_elasticache_replication_group.ledger : {
      id = group.replication_group_id, address = group.primary_endpoint_address
    }
  ])
}

output "node_ids" {
  description = "Instance ID of each store node and replica."
  value       = { for name, node in aws_instance.node : name => node.id }
}

output "backup_days" {
  description = "Days for which snapshots of the ledger's disk are kept, or null."
  value       = one(aws_dlm_lifecycle_policy.ledger[*].policy_details[0].schedule[0].retain_rule[0].count)
}
