"""Both papers' measurements of any model: a run, a published model, a .gguf file.

In reading order: `comparing` (`analyze`: models in, results.json and pages out), `texts` (rows of tokens), `measuring`
(all that is measured of one model), `observing` (sums and what follows from them), `interventions`, `domains`, `stages`
(work that is kept), `report`, `dynamics` (checkpoints of one run).
"""

from orthojax.experiments.analyzing.comparing import Analyzed as Analyzed
from orthojax.experiments.analyzing.comparing import Given as Given
from orthojax.experiments.analyzing.comparing import analyze as analyze
from orthojax.experiments.analyzing.comparing import measure_models as measure_models
from orthojax.experiments.analyzing.comparing import pages as pages
from orthojax.experiments.analyzing.measuring import Asked as Asked
from orthojax.experiments.analyzing.measuring import Measured as Measured
from orthojax.experiments.analyzing.report import headlines as headlines
