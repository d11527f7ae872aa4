"""Twenty networks of your own Flax class read scikit-learn's digits, with calibrated probabilities."""

import jax
import matplotlib.pyplot as plt
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import particlax as px


class Net(nnx.Module):
    """One hidden layer."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        """Logits [n, 10] of images [n, 64]."""
        return self.out(nnx.relu(self.hidden(x)))


x, y = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split(x / 16, y, test_size=600, random_state=0, stratify=y)
x, x_held, y, y_held = train_test_split(x, y, test_size=200, random_state=0, stratify=y)
net, key, data = px.modules.nnx(Net), jax.random.key(0), px.Minibatches({"x": x, "y": y}, 100)
flow = px.w_sgld_b(px.networks.classifier(net, num_data=len(y)), optimizer=optax.adam(0.01))
result = px.run(flow, net.init(key, 20), steps=3000, key=key, data=data)

predict = lambda x: px.predictive.categorical(net.apply, result.particles, x)
temperature = px.predictive.temperature(predict(x_held), y_held)
for t in (1.0, temperature):
    pred = predict(x_test).tempered(t)
    s = pred.score(y_test, bins=10)
    print(f"T = {t:.2f}: accuracy {s.accuracy:.3f}, NLL {-s.log_density:.3f}, ECE {s.ece:.3f}")
px.plots.reliability(plt.gca(), pred.reliability(y_test, bins=10))
plt.savefig("digits.png", dpi=150, bbox_inches="tight")
