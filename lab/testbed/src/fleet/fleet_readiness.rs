//! Check whether a fleet is ready, which means that all daemons report and that the load balancers' tables have every
//! server that accepts new connections.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::Fleet;
use super::names::controller_api_address;
use super::options::ServerAdminState;
use crate::addresses::load_balancer_name;
use crate::topology::Testbed;

impl Fleet {
    pub(super) fn check_ready(&self, testbed: &Testbed) -> anyhow::Result<()> {
        let status = self.query_status(testbed)?;
        let reporting_server_count =
            as_array_or_empty(&status["servers"]).iter().filter(|server| server["report_state"] == "fresh").count();
        let active_server_count =
            self.server_pool.values().filter(|admin_state| **admin_state == ServerAdminState::Active).count();
        let expected_reporting_server_count = if self.options.runs_agents { active_server_count } else { 0 };
        ensure!(
            reporting_server_count >= expected_reporting_server_count,
            "{reporting_server_count} servers report: expected {expected_reporting_server_count}"
        );
        for number in self.load_balancers.keys() {
            let unresolved_servers = &load_balancer_state(&status, *number)?["unresolved_servers"];
            ensure!(
                as_array_or_empty(unresolved_servers).is_empty(),
                "{} does not find {unresolved_servers}",
                load_balancer_name(*number)
            );
        }
        let services = as_array_or_empty(&status["services"]).iter();
        let newest_generations: Vec<(&str, u64)> =
            services.map(|service| self.query_complete_table_generation(testbed, service)).collect::<Result<_, _>>()?;
        // Query the status after the tables, because loads cause new tables all the time.
        let status = self.query_status(testbed)?;
        for (service, complete_generation) in newest_generations {
            for number in self.load_balancers.keys() {
                let used_generation =
                    load_balancer_state(&status, *number)?["table_generations"][service].as_u64().unwrap_or(0);
                let balancer_name = load_balancer_name(*number);
                ensure!(
                    used_generation >= complete_generation,
                    "{balancer_name} has table {used_generation} of {service}: expected {complete_generation}"
                );
            }
        }
        Ok(())
    }

    /// Checks that every rack controller is connected to a controller.
    pub(super) fn check_rack_controllers_connected(&self, testbed: &Testbed) -> anyhow::Result<()> {
        if self.rack_controllers.is_empty() {
            return Ok(());
        }
        let (connected_racks, expected_racks) =
            (as_array_or_empty(&self.query_status(testbed)?["racks"]).len(), self.rack_controllers.len());
        ensure!(connected_racks == expected_racks, "{connected_racks} racks are connected: expected {expected_racks}");
        Ok(())
    }

    /// Returns the service's name and the generation of its newest table. Fails if the table lacks a server that
    /// accepts new connections. The first table may lack servers whose MAC address or report was not known yet.
    fn query_complete_table_generation<'a>(
        &self,
        testbed: &Testbed,
        service: &'a Value,
    ) -> anyhow::Result<(&'a str, u64)> {
        let service_name = service["name"].as_str().context("a service without a name")?;
        let takes_connections = |member: &&Value| member["state"] == "active" || member["state"] == "joining";
        let expected_servers: BTreeSet<&str> = as_array_or_empty(&service["members"])
            .iter()
            .filter(takes_connections)
            .filter_map(|member| member["server"].as_str())
            .collect();
        let newest_table = self.query_newest_table(testbed, service_name)?;
        let servers_in_table: BTreeSet<&str> =
            as_array_or_empty(&newest_table["members"]).iter().filter_map(|member| member["server"].as_str()).collect();
        ensure!(
            servers_in_table.is_superset(&expected_servers),
            "the newest table of {service_name} has {servers_in_table:?}: expected {expected_servers:?}"
        );
        Ok((service_name, newest_table["generation"].as_u64().context("a table without a generation")?))
    }

    /// Queries the leading controller for a service's newest forwarding table by `GET /v1/tables/SERVICE`.
    fn query_newest_table(&self, testbed: &Testbed, service: &str) -> anyhow::Result<Value> {
        let token = fs::read_to_string(testbed.directory().join("viewer.token"))?;
        let query_controller = |number: &u16| {
            let mut curl = Command::new("curl");
            curl.args(["--silent", "--show-error", "--fail", "--max-time", "5", "--header"]);
            curl.arg(format!("Authorization: Bearer {}", token.trim()));
            curl.arg(format!("http://{}/v1/tables/{service}", controller_api_address(*number)));
            testbed.run_command(testbed.controller(), curl)
        };
        let mut curl_result = Err(anyhow::anyhow!("a fleet without a controller"));
        for number in self.controllers.keys() {
            curl_result = query_controller(number);
            if curl_result.is_ok() {
                break;
            }
        }
        Ok(serde_json::from_slice(&curl_result?.stdout)?)
    }
}

fn load_balancer_state(status: &Value, load_balancer: u16) -> anyhow::Result<&Value> {
    let name = load_balancer_name(load_balancer);
    let lb_status = as_array_or_empty(&status["load_balancers"]).iter().find(|balancer| balancer["name"] == name);
    let lb_state = lb_status.map(|balancer| &balancer["state"]).filter(|state| !state.is_null());
    lb_state.with_context(|| format!("{name} has sent nothing yet"))
}

pub(crate) fn as_array_or_empty(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}
