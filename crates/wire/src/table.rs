//! Placement tables from the controller.

use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::placement::{
    BucketCount, CandidateCore, PlacementRule, PlacementTable, PlacementTableMember, ServerCore,
};
use coreward_model::rss::RssKey;
use prost::Message as _;
use prost::bytes::Bytes;

use crate::address::parse_server_id;
use crate::configuration::ServiceIndex;
use crate::rss::parse_rss_key;
use crate::{WireError, WireErrorContext as _, v1};

/// Returns the encoded message with a placement table, which the streams of all load balancers share.
pub fn encode_table(service: ServiceIndex, table: &PlacementTable) -> Bytes {
    placement_table_to_message(service, table).encode_to_vec().into()
}

/// Parses a placement table. Fails if `bytes` are not a table that the data plane can hold.
pub fn decode_table(bytes: Bytes) -> Result<(ServiceIndex, PlacementTable), WireError> {
    let message = v1::PlacementTable::decode(bytes).map_err(|error| WireError::new("table", error))?;
    parse_table(&message)
}

fn placement_table_to_message(service: ServiceIndex, table: &PlacementTable) -> v1::PlacementTable {
    let candidate_field_values = |field: fn(&CandidateCore) -> u32| table.candidates.iter().map(field).collect();
    v1::PlacementTable {
        service_index: service.get().into(),
        generation: table.generation,
        rule: table.rule.name().to_owned(),
        bucket_count: table.bucket_count.get(),
        candidates_per_bucket: table.candidates_per_bucket,
        group_keys: table.rss_key_by_group.iter().map(|key| key.key_bytes().to_vec()).collect(),
        group_inputs: table.rss_key_by_group.iter().map(|key| key.input_transform().ethtool_number().into()).collect(),
        candidate_load: candidate_field_values(|candidate| candidate.fixed_point_load),
        candidate_server_id: candidate_field_values(|candidate| candidate.server.get().into()),
        candidate_core_slot: candidate_field_values(|candidate| candidate.core_slot.into()),
        assignment_cost: table.assignment_cost,
        member_server_id: table.members.iter().map(|member| member.server.get().into()).collect(),
        member_load: table.members.iter().map(|member| member.fixed_point_load).collect(),
        consistent_server_id: table.consistent_server_by_bucket.iter().map(|server| server.get().into()).collect(),
        previous_consistent_id: table
            .previous_consistent_server_by_bucket
            .iter()
            .map(|previous| previous.map_or(intf::NO_SERVER, |server| server.get().into()))
            .collect(),
        core_slot: table
            .core_slots
            .iter()
            .map(|core| u32::from(core.server.get()) << 16 | u32::from(core.core))
            .collect(),
        core_slot_age: table.load_age_by_core_slot.clone(),
        down_server_id: table.down_servers.iter().map(|server| server.get().into()).collect(),
    }
}

fn parse_table(message: &v1::PlacementTable) -> Result<(ServiceIndex, PlacementTable), WireError> {
    let service = ServiceIndex::parse("service_index", message.service_index)?;
    let table = PlacementTable {
        generation: message.generation,
        rule: parse_placement_rule(&message.rule)?,
        bucket_count: BucketCount::new(message.bucket_count.into())
            .map_err(|error| WireError::new("bucket_count", error))?,
        rss_key_by_group: parse_rss_keys(&message.group_keys, &message.group_inputs)?,
        candidates_per_bucket: check_max_value(
            "candidates_per_bucket",
            message.candidates_per_bucket,
            intf::MAX_CANDIDATES,
        )?,
        candidates: parse_candidates(message)?,
        assignment_cost: message.assignment_cost,
        core_slots: parse_core_slots(&message.core_slot)?,
        members: parse_members(message)?,
        consistent_server_by_bucket: parse_server_ids("consistent_server_id", &message.consistent_server_id)?,
        previous_consistent_server_by_bucket: parse_previous_servers(&message.previous_consistent_id)?,
        down_servers: parse_server_ids("down_server_id", &message.down_server_id)?,
        load_age_by_core_slot: message.core_slot_age.clone(),
    };
    check_list_lengths(&table)?;
    Ok((service, table))
}

fn parse_placement_rule(name: &str) -> Result<PlacementRule, WireError> {
    let unknown_rule_text =
        || format!("rule {name:?} is not known: expected one of {}", intf::PLACEMENT_RULE_NAMES.join(", "));
    PlacementRule::from_name(name).ok_or_else(|| WireError::new("rule", unknown_rule_text()))
}

fn check_max_value(field: &str, value: u32, max_value: u32) -> Result<u32, WireError> {
    if value <= max_value {
        Ok(value)
    } else {
        Err(WireError::new(field, format!("{value}: expected 0 to {max_value}")))
    }
}

fn check_max_length(field: &str, length: usize, max_length: u32) -> Result<(), WireError> {
    if length <= max_length as usize {
        return Ok(());
    }
    Err(WireError::new(field, format!("{length} entries: expected at most {max_length}")))
}

fn check_length(field: &str, length: usize, expected_length: usize) -> Result<(), WireError> {
    if length == expected_length {
        return Ok(());
    }
    Err(WireError::new(field, format!("{length} entries: expected {expected_length}")))
}

fn parse_rss_keys(keys: &[Vec<u8>], input_transforms: &[u32]) -> Result<Vec<RssKey>, WireError> {
    check_max_length("group_keys", keys.len(), intf::MAX_RSS_GROUPS)?;
    if !input_transforms.is_empty() {
        check_length("group_inputs", input_transforms.len(), keys.len())?;
    }
    let inputs = input_transforms.iter().copied().chain(std::iter::repeat(0));
    keys.iter()
        .zip(inputs)
        .enumerate()
        .map(|(group, (key, input))| parse_rss_key(key, input).with_field_prefix(format!("groups[{group}]")))
        .collect()
}

fn parse_server_ids(field: &str, ids: &[u32]) -> Result<Vec<ServerId>, WireError> {
    ids.iter().map(|id| parse_server_id(field, *id)).collect()
}

fn parse_previous_servers(ids: &[u32]) -> Result<Vec<Option<ServerId>>, WireError> {
    let parse_optional_server_id = |id: &u32| match *id {
        intf::NO_SERVER => Ok(None),
        id => parse_server_id("previous_consistent_id", id).map(Some),
    };
    ids.iter().map(parse_optional_server_id).collect()
}

fn parse_candidates(message: &v1::PlacementTable) -> Result<Vec<CandidateCore>, WireError> {
    let candidate_count = message.candidate_load.len();
    check_max_length("candidate_load", candidate_count, intf::MAX_TABLE_CANDIDATES)?;
    check_length("candidate_server_id", message.candidate_server_id.len(), candidate_count)?;
    check_length("candidate_core_slot", message.candidate_core_slot.len(), candidate_count)?;
    let slot_count = message.core_slot.len();
    let candidate_fields =
        message.candidate_load.iter().zip(&message.candidate_server_id).zip(&message.candidate_core_slot);
    candidate_fields
        .map(|((load, server), slot)| {
            if *slot as usize >= slot_count {
                let problem = format!("slot {slot}: expected one of the table's {slot_count} core slots");
                return Err(WireError::new("candidate_core_slot", problem));
            }
            let server = parse_server_id("candidate_server_id", *server)?;
            Ok(CandidateCore { server, fixed_point_load: *load, core_slot: *slot as u16 })
        })
        .collect()
}

fn parse_core_slots(cores: &[u32]) -> Result<Vec<ServerCore>, WireError> {
    check_max_length("core_slot", cores.len(), intf::MAX_CORE_SLOTS)?;
    cores
        .iter()
        .map(|packed_core| {
            Ok(ServerCore { server: parse_server_id("core_slot", packed_core >> 16)?, core: *packed_core as u16 })
        })
        .collect()
}

fn parse_members(message: &v1::PlacementTable) -> Result<Vec<PlacementTableMember>, WireError> {
    check_max_length("member_server_id", message.member_server_id.len(), intf::MAX_MEMBERS)?;
    check_length("member_load", message.member_load.len(), message.member_server_id.len())?;
    let member_fields = message.member_server_id.iter().zip(&message.member_load);
    member_fields
        .map(|(server, load)| {
            Ok(PlacementTableMember { server: parse_server_id("member_server_id", *server)?, fixed_point_load: *load })
        })
        .collect()
}

/// Checks that the lists of the table have consistent lengths. Every list position that the data plane computes must
/// exist.
fn check_list_lengths(table: &PlacementTable) -> Result<(), WireError> {
    let bucket_count = table.bucket_count.get() as usize;
    let candidates_per_bucket = table.candidates_per_bucket as usize;
    if !table.load_age_by_core_slot.is_empty() {
        check_length("core_slot_age", table.load_age_by_core_slot.len(), table.core_slots.len())?;
    }
    check_length(
        "candidate_load",
        table.candidates.len(),
        table.rss_key_by_group.len() * bucket_count * candidates_per_bucket,
    )?;
    if table.members.is_empty() {
        return check_length("consistent_server_id", table.consistent_server_by_bucket.len(), 0);
    }
    check_length("consistent_server_id", table.consistent_server_by_bucket.len(), bucket_count)?;
    if !table.previous_consistent_server_by_bucket.is_empty() {
        check_length("previous_consistent_id", table.previous_consistent_server_by_bucket.len(), bucket_count)?;
    }
    if table.rss_key_by_group.is_empty() {
        return Err(WireError::new("group_keys", "0 entries: expected at least 1, as there are members"));
    }
    if candidates_per_bucket == 0 && matches!(table.rule, PlacementRule::Table | PlacementRule::LeastAssigned) {
        let problem = format!("0: expected at least 1 under rule {}", table.rule.name());
        return Err(WireError::new("candidates_per_bucket", problem));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use coreward_model::policy::{self, PoolServer, ServerPool};
    use coreward_model::rss::{IndirectionTable, RssConfig};
    use proptest::prelude::*;

    use super::*;

    fn sample_pool(server_count: u64) -> ServerPool {
        let sample_pool_server = |n: u64| PoolServer {
            loads: Some(vec![n as f64 / 10.0; 4].into()),
            rss: Some(RssConfig {
                key: RssKey::microsoft_verification_key(),
                indirection_table: IndirectionTable::draw_balanced_entries(n, 128, 4).unwrap(),
            }),
            open_connection_count: 3,
            ..PoolServer::new((n * 31).try_into().unwrap())
        };
        ServerPool::new((0..server_count).map(sample_pool_server).collect(), 1)
    }

    proptest! {
        #[test]
        fn tables_of_every_policy_round_trip(server_count in 0u64..20, bits in 0u32..9, index in 0u32..1024) {
            for name in policy::policy_names() {
                let bucket_count = BucketCount::new(1 << bits).unwrap();
                let mut table = policy::create_policy_by_name(name, 5).unwrap()
                    .compute_table(&sample_pool(server_count), bucket_count, 9);
                table.down_servers = (0..server_count % 3).map(|n| (n * 31).try_into().unwrap()).collect();
                let service = ServiceIndex::new(index).unwrap();
                prop_assert_eq!(decode_table(encode_table(service, &table)), Ok((service, table)));
            }
        }
    }

    #[test]
    fn encoded_table_is_a_protobuf_message() {
        let table = policy::create_policy_by_name("crossrss", 5).unwrap().compute_table(
            &sample_pool(3),
            BucketCount::PAPER_VALUE,
            9,
        );
        let service = ServiceIndex::new(0).unwrap();
        let decoded_message = v1::PlacementTable::decode(encode_table(service, &table)).unwrap();
        assert_eq!((decoded_message.bucket_count, decoded_message.member_server_id), (128, vec![0, 31, 62]));
    }

    #[test]
    fn table_that_exceeds_data_plane_limits_is_rejected() {
        let error_after_change = |change: fn(&mut v1::PlacementTable)| {
            let table = policy::create_policy_by_name("crossrss", 5).unwrap().compute_table(
                &sample_pool(3),
                BucketCount::PAPER_VALUE,
                9,
            );
            let mut message = placement_table_to_message(ServiceIndex::new(0).unwrap(), &table);
            change(&mut message);
            parse_table(&message).unwrap_err().to_string()
        };
        assert_eq!(
            error_after_change(|m| m.bucket_count = 100),
            "bucket_count: 100 buckets: expected a power of two from 1 to 2048"
        );
        assert_eq!(error_after_change(|m| m.bucket_count = 64), "candidate_load: 128 entries: expected 64");
        assert_eq!(error_after_change(|m| m.candidates_per_bucket = 9), "candidates_per_bucket: 9: expected 0 to 8");
        assert_eq!(
            error_after_change(|m| m.candidate_core_slot[5] = 5_000),
            "candidate_core_slot: slot 5000: expected one of the table's 4 core slots"
        );
        assert_eq!(
            error_after_change(|m| m.member_server_id[0] = 20_000),
            "member_server_id: server id 20000 is out of range: expected 0 to 16383, the 14 bits that a cookie holds"
        );
        assert_eq!(
            error_after_change(|m| m.rule = "best".into()),
            "rule: rule \"best\" is not known: expected one of table, least_assigned, round_robin, power_of_two"
        );
        assert_eq!(
            error_after_change(|m| m.consistent_server_id.clear()),
            "consistent_server_id: 0 entries: expected 128"
        );
        assert_eq!(error_after_change(|m| m.member_load.clear()), "member_load: 0 entries: expected 3");
        assert!(decode_table(Bytes::from_static(&[0xff; 3])).is_err());
    }
}
