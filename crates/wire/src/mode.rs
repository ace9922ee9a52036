//! How a service's packets find their server.

use coreward_model::consistency::{Consistency, ServiceMode, Timestamps};

use crate::{WireError, v1};

impl From<ServiceMode> for v1::ServiceMode {
    fn from(mode: ServiceMode) -> Self {
        Self { consistency: mode.consistency.name(), timestamps: mode.timestamps.name().to_owned() }
    }
}

impl TryFrom<&v1::ServiceMode> for ServiceMode {
    type Error = WireError;

    fn try_from(message: &v1::ServiceMode) -> Result<Self, WireError> {
        let consistency: Consistency =
            message.consistency.parse().map_err(|error| WireError::new("consistency", error))?;
        let timestamps: Timestamps = message.timestamps.parse().map_err(|error| WireError::new("timestamps", error))?;
        Ok(Self { consistency, timestamps })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_come_back_and_others_are_named() {
        for consistency in Consistency::ALL {
            for timestamps in [Timestamps::Server, Timestamps::LoadBalancer, Timestamps::Off] {
                let mode = ServiceMode { consistency, timestamps };
                assert_eq!(ServiceMode::try_from(&v1::ServiceMode::from(mode)), Ok(mode));
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
            error(v1::ServiceMode { timestamps: "client".into(), ..good }),
            "timestamps: timestamps by \"client\": expected \"server\", \"lb\" or \"off\""
        );
    }
}
