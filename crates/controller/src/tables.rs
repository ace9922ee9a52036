//! Placement tables in the form of the API.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use coreward_api::types::{Candidate, Member, Table, TableSummary, Tables};
use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::placement::PlacementTable;

use super::service::Service;
use super::{ClockReadings, Controller};

fn to_load_fraction(fixed_point_load: u32) -> f64 {
    f64::from(fixed_point_load) / f64::from(intf::LOAD_ONE)
}

impl Controller {
    /// Returns a summary of the newest table of every service, without the contents.
    pub fn table_summaries(&self, now: ClockReadings) -> Tables {
        let summarize_table = |service: &Service| {
            let table_and_age = service.newest_table_and_age(now);
            TableSummary {
                service: service.configuration().name.clone(),
                generation: table_and_age.map_or(0, |(table, _)| table.generation),
                age_ms: table_and_age.map_or(0, |(_, age)| age.as_millis() as u32),
                placement_rule: table_and_age.map(|(table, _)| table.rule.name().to_owned()),
                bucket_count: service.configuration().bucket_count.get(),
            }
        };
        Tables { tables: self.services.iter().map(summarize_table).collect() }
    }

    pub fn service_position(&self, name: &str) -> Option<usize> {
        self.services.iter().position(|service| service.configuration().name == name)
    }

    /// Returns the newest table of this service and its age, or `None` if the service is unknown or has no table yet.
    pub fn newest_table(&self, service: &str, now: ClockReadings) -> Option<(Arc<PlacementTable>, Duration)> {
        let service = &self.services[self.service_position(service)?];
        let (_, age) = service.newest_table_and_age(now)?;
        Some((service.newest_table()?.table, age))
    }
}

/// Converts the table to the form of the API. `names` has the names of all servers.
pub fn to_api_table(service: &str, table: &PlacementTable, age: Duration, names: &HashMap<ServerId, String>) -> Table {
    let find_server_name = |id: ServerId| names.get(&id).cloned().unwrap_or_else(|| format!("(id {id})"));
    let to_api_member = |member: &coreward_model::placement::PlacementTableMember| Member {
        server: find_server_name(member.server),
        load: to_load_fraction(member.fixed_point_load),
    };
    Table {
        service: service.to_owned(),
        generation: table.generation,
        age_ms: age.as_millis() as u32,
        placement_rule: table.rule.name().to_owned(),
        bucket_count: table.bucket_count.get(),
        candidates_by_rss_group: candidates_by_group_and_bucket(table, find_server_name),
        members: table.members.iter().map(to_api_member).collect(),
        consistent_servers: table.consistent_server_by_bucket.iter().map(|id| find_server_name(*id)).collect(),
    }
}

fn candidates_by_group_and_bucket(
    table: &PlacementTable,
    name: impl Fn(ServerId) -> String,
) -> Vec<Vec<Vec<Candidate>>> {
    let (buckets, per_bucket) = (table.bucket_count.get() as usize, table.candidates_per_bucket as usize);
    let to_api_candidate = |candidate: &coreward_model::placement::CandidateCore| Candidate {
        server: name(candidate.server),
        core: table.core_slots.get(usize::from(candidate.core_slot)).map(|core| core.core.into()),
        load: to_load_fraction(candidate.fixed_point_load),
    };
    let group_candidates = table.candidates.chunks((buckets * per_bucket).max(1));
    let candidates_by_bucket = |group: &[_]| {
        group
            .chunks(per_bucket.max(1))
            .map(|bucket_candidates| bucket_candidates.iter().map(to_api_candidate).collect())
            .collect()
    };
    group_candidates.map(candidates_by_bucket).collect()
}
