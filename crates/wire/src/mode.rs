//! Consistency modes of services.

use coreward_model::consistency::{Consistency, ServiceMode, Timestamps, Transfer};
use coreward_model::forwarding::Forwarding;

use crate::address::parse_server_id;
use crate::{Context as _, WireError, v1};

const ADOPTED: &str = "adopted";
const HANDED_OVER: &str = "handed-over";

impl From<ServiceMode> for v1::ServiceMode {
    fn from(mode: ServiceMode) -> Self {
        Self {
            consistency: mode.consistency.name(),
            timestamps: mode.timestamps.name().to_owned(),
            transfer: mode.transfer.map(Into::into),
            forwarding: mode.forwarding.name().to_owned(),
        }
    }
}

impl TryFrom<&v1::ServiceMode> for ServiceMode {
    type Error = WireError;

    fn try_from(message: &v1::ServiceMode) -> Result<Self, WireError> {
        let consistency: Consistency =
            message.consistency.parse().map_err(|error| WireError::new("consistency", error))?;
        let timestamps: Timestamps = message.timestamps.parse().map_err(|error| WireError::new("timestamps", error))?;
        let transfer = message.transfer.as_ref().map(Transfer::try_from).transpose().within("transfer")?;
        let forwarding = parse_forwarding(&message.forwarding)?;
        Ok(Self { consistency, timestamps, transfer, forwarding })
    }
}

/// Controllers of versions without this field send nothing.
fn parse_forwarding(name: &str) -> Result<Forwarding, WireError> {
    if name.is_empty() {
        return Ok(Forwarding::default());
    }
    name.parse().map_err(|error| WireError::new("forwarding", error))
}

impl From<Transfer> for v1::Transfer {
    fn from(transfer: Transfer) -> Self {
        let direction = match transfer {
            Transfer::AdoptedFrom(_) => ADOPTED,
            Transfer::HandedOverTo(_) => HANDED_OVER,
        };
        Self { direction: direction.to_owned(), other_balancer_id: transfer.other_balancer().get().into() }
    }
}

impl TryFrom<&v1::Transfer> for Transfer {
    type Error = WireError;

    fn try_from(message: &v1::Transfer) -> Result<Self, WireError> {
        let id = parse_server_id("other_balancer_id", message.other_balancer_id)?;
        match message.direction.as_str() {
            ADOPTED => Ok(Transfer::AdoptedFrom(id)),
            HANDED_OVER => Ok(Transfer::HandedOverTo(id)),
            other => Err(WireError::new("direction", format!("{other:?}: expected {ADOPTED:?} or {HANDED_OVER:?}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_round_trip_and_unknown_ones_are_named() {
        for consistency in Consistency::ALL {
            for timestamps in [Timestamps::Server, Timestamps::LoadBalancer, Timestamps::Off] {
                let other = 7.try_into().unwrap();
                for transfer in [None, Some(Transfer::AdoptedFrom(other)), Some(Transfer::HandedOverTo(other))] {
                    for forwarding in Forwarding::ALL {
                        let mode = ServiceMode { consistency, timestamps, transfer, forwarding };
                        assert_eq!(ServiceMode::try_from(&v1::ServiceMode::from(mode)), Ok(mode));
                    }
                }
            }
        }
        let good = v1::ServiceMode::from(ServiceMode::default());
        let error = |message: v1::ServiceMode| ServiceMode::try_from(&message).unwrap_err().to_string();
        assert_eq!(
            error(v1::ServiceMode { consistency: "sticky".into(), ..good.clone() }),
            "consistency: consistency \"sticky\" is not known: expected \"stateless\", \"stateful\", \"none\", \
             \"hash-table\" or \"beamer\""
        );
        assert_eq!(
            error(v1::ServiceMode { timestamps: "client".into(), ..good.clone() }),
            "timestamps: timestamps by \"client\": expected \"server\", \"lb\" or \"off\""
        );
        assert_eq!(
            error(v1::ServiceMode { forwarding: "vxlan".into(), ..good.clone() }),
            "forwarding: forwarding \"vxlan\" is not known: expected \"l2\", \"ipip\" or \"gue\""
        );
        let unnamed = v1::ServiceMode { forwarding: String::new(), ..good.clone() };
        assert_eq!(ServiceMode::try_from(&unnamed), Ok(ServiceMode::default()));
        let away = v1::Transfer { direction: "away".into(), other_balancer_id: 7 };
        assert_eq!(
            error(v1::ServiceMode { transfer: Some(away), ..good }),
            "transfer.direction: \"away\": expected \"adopted\" or \"handed-over\""
        );
    }
}
