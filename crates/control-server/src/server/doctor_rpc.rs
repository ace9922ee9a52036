//! Answers to `coreward doctor` from machines of the fleet.

use coreward_wire::address::address_to_bytes;
use coreward_wire::v1;

use super::controller_state::ControllerState;
use coreward_fleet::fleet::{FleetServer, FleetService, ServerAdminState};

/// Returns the fleet's data that `coreward doctor` needs for its checks on a machine.
pub fn build_fleet_reply(state: &ControllerState) -> v1::FleetReply {
    let controller = state.lock_controller();
    let fleet = controller.fleet();
    let to_service_message = |service: &FleetService| v1::FleetService {
        name: service.name.clone(),
        address: Some(service.address.into()),
        timestamps: service.settings.timestamps.name().to_owned(),
        forwarding: service.settings.forwarding.name().to_owned(),
        servers: service.members.keys().map(|id| fleet.servers[id].name.clone()).collect(),
    };
    let to_server_message = |server: &FleetServer| v1::FleetServer {
        name: server.name.clone(),
        address: address_to_bytes(server.address),
        vlan: server.vlan.id_or_zero().into(),
    };
    v1::FleetReply {
        services: fleet.services.iter().map(to_service_message).collect(),
        servers: fleet
            .servers
            .values()
            .filter(|server| server.admin_state != ServerAdminState::Left)
            .map(to_server_message)
            .collect(),
        reports_ahead: controller.clock_ahead_report_count,
    }
}
